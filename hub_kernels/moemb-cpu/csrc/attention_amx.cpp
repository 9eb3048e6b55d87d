// Forward of varlen attention for bf16 on AMX: products of bf16 with fp32 sums, softmax in fp32, probabilities rounded
// to bf16. Tasks and lanes as in attention.h, but for twice as many lanes: packing the values costs more here.
//
// Both products are computed transposed. Scores (keys, lanes) = K Q^T takes rows of K as they are; their rounded
// exponentials, two keys side by side, are the right operand of O^T = V^T P^T.
#include <math.h>

#include "attention.h"

namespace moemb {
namespace {

constexpr int64_t kTile = 16;  // rows of a tile, and its 32-bit columns
constexpr int64_t kPair = 32;  // everything is padded to pairs of tiles
constexpr int64_t kTileWords = 256;
constexpr int64_t kAmxKeys = 128;   // keys per step of the online softmax
constexpr int64_t kAmxLanes = 256;  // lanes per task
constexpr int64_t kKeyTiles = kAmxKeys / kPair;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Buffers of one thread. A word is two bf16.
struct Work {
  uint32_t* queries;        // (lane tiles, dim / 32, tile): pairs of features by lanes
  uint32_t* keys;           // (kAmxKeys, dim / 2)
  uint32_t* values;         // (dim / 16, kKeyTiles, tile): features by pairs of keys
  uint32_t* probabilities;  // (kLaneBlock / 16, kKeyTiles, tile): pairs of keys by lanes
  float* scores;            // (kAmxKeys, kLaneBlock)
  float* output;            // (dim, lanes)
  float* largest;           // (lanes)
  float* total;             // (lanes)
  float* decay;             // (kLaneBlock)
};

bool allocate(int64_t lanes, int64_t padded, Work& work) {
  static thread_local Scratch scratch;
  const int64_t rows = kAmxKeys * padded / 2;
  float* next = scratch.floats(lanes * padded / 2 + 2 * rows + kAmxKeys * kLaneBlock * 3 / 2 + lanes * padded +
                               2 * lanes + kLaneBlock);
  if (next == nullptr) return false;
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  const auto words = [&take](int64_t count) { return reinterpret_cast<uint32_t*>(take(count)); };
  work.queries = words(lanes * padded / 2);
  work.keys = words(rows);
  work.values = words(rows);
  work.probabilities = words(kAmxKeys * kLaneBlock / 2);
  work.scores = take(kAmxKeys * kLaneBlock);
  work.output = take(lanes * padded);
  work.largest = take(lanes);
  work.total = take(lanes);
  work.decay = take(kLaneBlock);
  return true;
}

// 32 features from `column` on, zeros beyond `dim`.
inline __m512i load_words(const Bf16* row, int64_t column, int64_t dim) {
  const int64_t count = dim - column;
  const __mmask32 mask = count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1u;
  return _mm512_maskz_loadu_epi16(mask, row + column);
}

inline void store_tile(Vec rows[kLanes], uint32_t* tile) {
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) _mm512_store_ps(reinterpret_cast<float*>(tile) + i * kTile, rows[i]);
}

void pack_queries(const MoembAttention& inputs, const Task& task, int64_t lanes, int64_t padded, uint32_t* target) {
  const int64_t repeat = inputs.heads / inputs.key_heads;
  const Bf16* queries = static_cast<const Bf16*>(inputs.query) + (task.origin + task.query) * inputs.query_stride[0] +
                        task.key_head * repeat * inputs.query_stride[1];
  for (int64_t lane = 0; lane < round_up(lanes, kPair); lane += kTile) {
    for (int64_t column = 0; column < padded; column += kPair, target += kTileWords) {
      Vec rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t token = (lane + i) / repeat, head = (lane + i) % repeat;
        const Bf16* row = queries + token * inputs.query_stride[0] + head * inputs.query_stride[1];
        rows[i] = lane + i < lanes ? _mm512_castsi512_ps(load_words(row, column, inputs.dim)) : zeros();
      }
      store_tile(rows, target);
    }
  }
}

void pack_keys(const Bf16* keys, int64_t stride, int64_t count, int64_t dim, int64_t padded, uint32_t* target) {
  for (int64_t key = 0; key < round_up(count, kPair); ++key) {
    for (int64_t column = 0; column < padded; column += kPair) {
      const __m512i words = key < count ? load_words(keys + key * stride, column, dim) : _mm512_setzero_si512();
      _mm512_store_si512(target + (key * padded + column) / 2, words);
    }
  }
}

// Tiles of 16 features by 32 keys: two keys are laid side by side, then 32-bit words are transposed.
void pack_values(const Bf16* values, int64_t stride, int64_t count, int64_t dim, int64_t padded, uint32_t* target) {
  for (int64_t column = 0; column < padded; column += kTile) {
    const __mmask16 mask = tail(dim - column);
    for (int64_t key = 0; key < round_up(count, kPair); key += kPair) {
      Vec rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t first = key + 2 * i;
        const Bf16* row = values + first * stride + column;
        const __mmask16 low = first < count ? mask : 0, high = first + 1 < count ? mask : 0;
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low, row));
        const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, high != 0 ? row + stride : row));
        rows[i] = _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
      store_tile(rows, target + (column / kTile * kKeyTiles + key / kPair) * kTileWords);
    }
  }
}

// scores (32 keys, 32 lanes) = keys times queries
void score_tiles(const uint32_t* keys, const uint32_t* queries, int64_t padded, float* scores) {
  const int64_t steps = padded / kPair, row_bytes = padded * 2, score_bytes = kLaneBlock * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, keys + step * kTile, row_bytes);
    _tile_loadd(5, keys + kTile * padded / 2 + step * kTile, row_bytes);
    _tile_loadd(6, queries + step * kTileWords, 64);
    _tile_loadd(7, queries + (steps + step) * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, score_bytes);
  _tile_stored(1, scores + kTile, score_bytes);
  _tile_stored(2, scores + kTile * kLaneBlock, score_bytes);
  _tile_stored(3, scores + kTile * kLaneBlock + kTile, score_bytes);
}

// output (32 features, 32 lanes) += values times probabilities, over `steps` groups of 32 keys
void output_tiles(const uint32_t* values, const uint32_t* probabilities, int64_t steps, float* output,
                  int64_t output_row) {
  const int64_t output_bytes = output_row * sizeof(float);
  _tile_loadd(0, output, output_bytes);
  _tile_loadd(1, output + kTile, output_bytes);
  _tile_loadd(2, output + kTile * output_row, output_bytes);
  _tile_loadd(3, output + kTile * output_row + kTile, output_bytes);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, values + step * kTileWords, 64);
    _tile_loadd(5, values + (kKeyTiles + step) * kTileWords, 64);
    _tile_loadd(6, probabilities + step * kTileWords, 64);
    _tile_loadd(7, probabilities + (kKeyTiles + step) * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, output, output_bytes);
  _tile_stored(1, output + kTile, output_bytes);
  _tile_stored(2, output + kTile * output_row, output_bytes);
  _tile_stored(3, output + kTile * output_row + kTile, output_bytes);
}

// 2^x to 1e-4, enough before rounding to bf16, in half the instructions of exp2(). Below 2^-126 it stays there.
inline Vec coarse_exp2(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const Vec bounded = _mm512_max_ps(splat(-126.0f), x);
  const Vec shifted = add(bounded, shift);
  const Vec rest = sub(bounded, sub(shifted, shift));
  Vec value = fma(splat(5.500890305e-02f), rest, splat(2.422109679e-01f));
  value = fma(value, rest, splat(6.932829327e-01f));
  value = fma(value, rest, splat(1.0f));
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), power));
}

// Two probabilities of each lane as a word: bf16 by adding half a unit (they are at least 0; NaN stays NaN).
inline __m512i pair_words(Vec even, Vec odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

struct Step {
  int64_t first, visible;    // keys that some lane of the block sees
  const __m512i* positions;  // of the queries, when some key must be hidden from some lane
  float scale;
};

// The rounded product. A plain one may be fused with the subtraction that follows, and then the largest score differs
// from the rounded peak by up to half a last place: beyond 2^31 that is more than the whole range of exp2.
Vec scaled(Vec score, Vec scale) {
  return _mm512_mul_round_ps(score, scale, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Online softmax of 16 lanes; returns whether earlier sums must be rescaled.
bool softmax_lanes(const Work& work, const Step& step, int64_t lane, float* largest, float* total) {
  float* const scores = work.scores + lane;
  const Vec scale = splat(step.scale), before = load(largest);
  Vec peak = splat(-__builtin_inff());
  for (int64_t key = 0; key < step.visible; ++key) {
    Vec score = load(scores + key * kLaneBlock);
    if (step.positions != nullptr) {
      score = hide_future(score, step.first + key, step.positions[lane / kLanes]);
      store(scores + key * kLaneBlock, score);
    }
    peak = _mm512_max_ps(score, peak);
  }
  const Vec now = _mm512_max_ps(scaled(peak, scale), before);
  const auto probability = [&](int64_t key) {
    if (key >= step.visible) return zeros();
    const Vec score = load(scores + key * kLaneBlock);
    const Vec value = coarse_exp2(sub(scaled(score, scale), now));
    if (step.positions == nullptr) return value;
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, splat(-__builtin_inff()), _CMP_NEQ_UQ), value);
  };
  const Vec factor = exp2(sub(before, now));
  Vec sums[2] = {mul(load(total), factor), zeros()};
  uint32_t* words = work.probabilities + lane / kLanes * kKeyTiles * kTileWords;
  for (int64_t key = 0; key < round_up(step.visible, kPair); key += 2, words += kTile) {
    const Vec even = probability(key), odd = probability(key + 1);
    sums[0] = add(sums[0], even);
    sums[1] = add(sums[1], odd);
    _mm512_store_si512(words, pair_words(even, odd));
  }
  store(largest, now);
  store(total, add(sums[0], sums[1]));
  store(work.decay + lane, factor);
  return _mm512_cmp_ps_mask(factor, splat(1.0f), _CMP_NEQ_UQ) != 0;
}

// `count` packed keys from `first` on, for all lanes of the task.
void attend_block(const MoembAttention& inputs, const Task& task, const Work& work, int64_t first, int64_t count,
                  int64_t lanes, int64_t padded) {
  const int64_t repeat = inputs.heads / inputs.key_heads, task_lanes = round_up(lanes, kPair);
  for (int64_t lane = 0; lane < lanes; lane += kLaneBlock) {
    const int64_t width = smaller(kLaneBlock, task_lanes - lane), rows = smaller(kLaneBlock, lanes - lane);
    Window window;
    set_window(task, inputs.causal, first, count, lane, rows, width, repeat, window);
    if (window.visible <= 0) continue;
    const Step step = {first, window.visible, window.positions, inputs.scaling * 1.44269504f};
    const uint32_t* queries = work.queries + lane * padded / 2;
    for (int64_t key = 0; key < step.visible; key += kPair) {
      for (int64_t column = 0; column < width; column += kPair) {
        score_tiles(work.keys + key * padded / 2, queries + column * padded / 2, padded,
                    work.scores + key * kLaneBlock + column);
      }
    }
    bool rescale = false;
    for (int64_t v = 0; v < width; v += kLanes) {
      rescale |= softmax_lanes(work, step, v, work.largest + lane + v, work.total + lane + v);
    }
    float* output = work.output + lane;
    for (int64_t row = 0; rescale && first > 0 && row < padded; ++row) {
      for (int64_t v = 0; v < width; v += kLanes) {
        store(output + row * task_lanes + v, mul(load(output + row * task_lanes + v), load(work.decay + v)));
      }
    }
    for (int64_t column = 0; column < width; column += kPair) {
      for (int64_t row = 0; row < padded; row += kPair) {
        output_tiles(work.values + row / kTile * kKeyTiles * kTileWords,
                     work.probabilities + column / kTile * kKeyTiles * kTileWords, ceil_div(step.visible, kPair),
                     output + row * task_lanes + column, task_lanes);
      }
    }
  }
}

void write_output(const MoembAttention& inputs, const Task& task, const Work& work, int64_t lanes, Bf16* output,
                  float* log_sum) {
  const int64_t repeat = inputs.heads / inputs.key_heads, task_lanes = round_up(lanes, kPair);
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const Vec inverse = div(splat(1.0f), load(work.total + lane));
    for (int64_t column = 0; column < inputs.dim; column += kLanes) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        block[i] = mul(load(work.output + (column + i) * task_lanes + lane), inverse);
      }
      transpose(block);
      for (int64_t i = 0; i < smaller(kLanes, lanes - lane); ++i) {
        const int64_t token = task.origin + task.query + (lane + i) / repeat;
        const int64_t row = token * inputs.heads + task.key_head * repeat + (lane + i) % repeat;
        store(output + row * inputs.dim + column, block[i], tail(inputs.dim - column));
      }
    }
  }
  for (int64_t lane = 0; log_sum != nullptr && lane < lanes; ++lane) {
    const int64_t token = task.origin + task.query + lane / repeat;
    log_sum[token * inputs.heads + task.key_head * repeat + lane % repeat] =
        work.largest[lane] + log2f(work.total[lane]);
  }
}

void attend_task(const MoembAttention& inputs, const Task& task, const Work& work, Bf16* output, float* log_sum) {
  const int64_t dim = inputs.dim, padded = round_up(dim, kPair);
  const int64_t lanes = task.queries * (inputs.heads / inputs.key_heads), task_lanes = round_up(lanes, kPair);
  const Bf16* keys =
      static_cast<const Bf16*>(inputs.key) + task.start * inputs.key_stride[0] + task.key_head * inputs.key_stride[1];
  const Bf16* values = static_cast<const Bf16*>(inputs.value) + task.start * inputs.value_stride[0] +
                       task.key_head * inputs.value_stride[1];
  pack_queries(inputs, task, lanes, padded, work.queries);
  memset(work.output, 0, padded * task_lanes * sizeof(float));
  for (int64_t lane = 0; lane < task_lanes; ++lane) {
    work.largest[lane] = -__builtin_inff();
    work.total[lane] = 0.0f;
  }
  const int64_t seen = inputs.causal ? task.query + task.queries : task.length;
  for (int64_t first = 0; first < seen; first += kAmxKeys) {
    const int64_t count = smaller(kAmxKeys, seen - first);
    pack_keys(keys + first * inputs.key_stride[0], inputs.key_stride[0], count, dim, padded, work.keys);
    pack_values(values + first * inputs.value_stride[0], inputs.value_stride[0], count, dim, padded, work.values);
    attend_block(inputs, task, work, first, count, lanes, padded);
  }
  write_output(inputs, task, work, lanes, output, log_sum);
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" int moemb_cpu_attention_amx(const MoembAttention* inputs, void* output, float* log_sum) {
  const int64_t repeat = inputs->heads / inputs->key_heads;
  const int64_t queries = kAmxLanes / repeat < 1 ? 1 : kAmxLanes / repeat;
  const int64_t count = list_tasks(*inputs, queries, nullptr);
  Task* tasks = static_cast<Task*>(malloc((count + 1) * sizeof(Task)));
  if (tasks == nullptr) return MOEMB_NO_MEMORY;
  list_tasks(*inputs, queries, tasks);
  bool failed = false;
#pragma omp parallel if (count > 1 && score_work(*inputs) > 4 * kSerialWork)
  {
    Work work;
    const bool ready = allocate(round_up(queries * repeat, kPair), round_up(inputs->dim, kPair), work);
    if (!ready) {
#pragma omp atomic write
      failed = true;
    }
    const TileConfig config;
    _tile_loadconfig(&config);
#pragma omp for schedule(dynamic) nowait
    for (int64_t index = 0; index < count; ++index) {
      if (ready) attend_task(*inputs, tasks[count - 1 - index], work, static_cast<Bf16*>(output), log_sum);
    }
    _tile_release();
  }
  free(tasks);
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

// Experts in bf16 on AMX: output = sum over slots of weight * down(silu(gate x) * up x).
//
// Per block of rows of one expert: gather and pack the tokens, multiply by gate and up rows, activate straight into the
// packed form the second product wants, multiply by down rows, write one row per (token, slot). A last pass adds a
// token's rows in the order of its slots. The routing weight is folded into the activation, in fp32.
#include <omp.h>

#include "gemm_amx_products.h"

namespace moemb {
namespace {

constexpr int kMostRows = 256;  // of a block

// The activation of a product of gate and up rows, written as tiles of B for the second product.
class Activate : public Deferred<Activate> {
 public:
  struct Target {
    char* act[2];         // where 16 rows of pairs of each token tile go
    Vec weight[2];        // of the 16 tokens of each tile
    Bf16* const* saved;   // rows of gate and up values to keep, or null
    int64_t column, intermediate;
  };

  void begin(int token_tiles, const Target& target, int64_t calls) {
    target_ = target;
    tiles_ = token_tiles;
    Deferred::begin(8 * token_tiles + (target.saved == nullptr ? 0 : token_tiles), calls);
  }

  inline __attribute__((always_inline)) void slice(int number) {
    if (number >= 8 * tiles_) return save(number - 8 * tiles_);
    const int tile = number >> 3, pair = number & 7;
    const float* gate = tiles + tile * 256 + pair * 32;
    const float* up = gate + 512;
    const Vec first = mul(activate(load(gate), load(up)), target_.weight[tile]);
    const Vec second = mul(activate(load(gate + 16), load(up + 16)), target_.weight[tile]);
    _mm512_store_si512(target_.act[tile] + pair * 64, interleave_rows(first, second));
  }

 private:
  static Vec activate(Vec gate, Vec up) { return mul(mul(gate, up), quick_sigmoid(gate)); }

  void save(int tile) {
    Vec pairs[kTileRows];
    const float* gate = tiles + tile * 256;
    for (int i = 0; i < 8; ++i) {
      pairs[i] = as_vec(interleave_rows(load(gate + 32 * i), load(gate + 32 * i + 16)));
      pairs[8 + i] = as_vec(interleave_rows(load(gate + 512 + 32 * i), load(gate + 512 + 32 * i + 16)));
    }
    transpose(pairs);
    const Mask mask = tail(target_.intermediate - target_.column);
    for (int row = 0; row < kTileRows; ++row) {
      Bf16* saved = target_.saved[tile * kTileRows + row];
      if (saved == nullptr) break;
      saved += target_.column;
      _mm256_mask_storeu_epi16(saved, mask, _mm512_castsi512_si256(as_int(pairs[row])));
      _mm256_mask_storeu_epi16(saved + target_.intermediate, mask, _mm512_extracti64x4_epi64(as_int(pairs[row]), 1));
    }
  }

  Target target_;
  int tiles_ = 0;
};

// One range of tokens.
struct Range {
  const Experts& problem;
  Plan plan;
  int64_t hidden_blocks, inner_blocks;  // k blocks of the first and second product
  Bf16* outputs;                        // [tokens * slots, hidden]
  bool stream;

  int64_t panel_bytes(int64_t tiles) const { return tiles * hidden_blocks * kTile; }
  int64_t act_bytes(int64_t tiles) const { return tiles * inner_blocks * kTile; }
  static int64_t tiles(const Block& block) { return (block.rows + kTileRows - 1) / kTileRows; }
  // a place for the tiles of block `number` where every block has its own
  int64_t first_tile(int64_t number) const { return plan.blocks[number].first / kTileRows + number; }
};

void pack(const Range& range, const Block& block, char* panel) {
  const Experts& p = range.problem;
  const Bf16* states = static_cast<const Bf16*>(p.states);
  for (int64_t tile = 0; tile < Range::tiles(block); ++tile) {
    const Bf16* rows[kTileRows];
    for (int row = 0; row < kTileRows; ++row) {
      const int64_t place = tile * kTileRows + row;
      rows[row] = nullptr;
      if (place < block.rows) {
        rows[row] = states + range.plan.order[block.first + place] / p.slots * p.states_stride;
      }
    }
    pack_token_tile(rows, p.hidden, panel + range.panel_bytes(tile));
  }
  stores_before_tiles();
}

// The first product for columns `from` .. `to` of the intermediate (multiples of 32 but for the end).
void up(const Range& range, const Block& block, const char* panel, char* act, int64_t from, int64_t to,
        char* space) {
  const Experts& p = range.problem;
  const int64_t hidden = p.hidden, inner = p.intermediate, token_tiles = Range::tiles(block);
  const Bf16* weight = static_cast<const Bf16*>(p.gate_up_proj) + block.expert * 2 * inner * hidden;
  alignas(64) float weights[kMostRows] = {};
  Bf16* saved[kMostRows] = {};
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t pair = range.plan.order[block.first + row];
    weights[row] = p.weight[pair];
    if (p.saved != nullptr) saved[row] = static_cast<Bf16*>(p.saved) + pair * 2 * inner;
  }
  const int64_t calls = Chunks(range.hidden_blocks).blocks;
  Activate work;
  const auto rows_at = [&](int64_t pair) {
    const Bf16* gate = weight + pair * kTileRows * hidden;
    const int64_t left = inner - pair * kTileRows;
    return WeightRows{gate, gate + inner * hidden, left, left, hidden};
  };
  const auto begin = [&](int64_t pair, int64_t tile, int columns) {
    Activate::Target target;
    for (int64_t j = 0; j < columns; ++j) {
      target.act[j] = act + range.act_bytes(tile + j) + pair * kTile / 2;  // 16 columns fill half of a tile
      target.weight[j] = load(weights + (tile + j) * kTileRows);
    }
    target.saved = p.saved == nullptr ? nullptr : saved + tile * kTileRows;
    target.column = pair * kTileRows;
    target.intermediate = inner;
    work.begin(columns, target, calls);
  };
  const int64_t first = from / kTileRows, last = (to + kTileRows - 1) / kTileRows;
  multiply(first, last, panel, token_tiles, range.hidden_blocks, space, rows_at, work, begin);
  if (to == inner && (inner - 1) % kStep < kTileRows) {  // the second half of the last k block is no column
    for (int64_t tile = 0; tile < token_tiles; ++tile) {
      char* half = act + range.act_bytes(tile) + inner / kStep * kTile + kTile / 2;
      for (int line = 0; line < 8; ++line) _mm512_store_si512(half + line * 64, _mm512_setzero_si512());
    }
  }
  stores_before_tiles();
}

void down(const Range& range, const Block& block, const char* act, int64_t from, int64_t to, char* space) {
  const Experts& p = range.problem;
  Bf16* rows[kMostRows] = {};
  for (int64_t row = 0; row < block.rows; ++row) {
    rows[row] = range.outputs + range.plan.order[block.first + row] * p.hidden;
  }
  const Bf16* weight = static_cast<const Bf16*>(p.down_proj) + block.expert * p.hidden * p.intermediate;
  multiply_rows(weight, p.hidden, p.intermediate, nullptr, act, Range::tiles(block), from / 32, (to + 31) / 32, rows,
                range.stream, space);
}

// Add the rows of each token's slots, in order.
void combine(const Experts& p, const Bf16* rows, Bf16* output, int64_t token) {
  const int64_t hidden = p.hidden;
  const int64_t* index = p.index + token * p.slots;
  for (int64_t h = 0; h < hidden; h += 32) {
    Vec low = zeros(), high = zeros();
    const __mmask32 mask = tail32(hidden - h);
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      if (index[slot] == p.experts) continue;
      const __m512i row = _mm512_maskz_loadu_epi16(mask, rows + (token * p.slots + slot) * hidden + h);
      low = add(low, widen_bf16(_mm512_castsi512_si256(row)));
      high = add(high, widen_bf16(_mm512_extracti64x4_epi64(row, 1)));
    }
    _mm512_mask_storeu_epi16(output + token * hidden + h, mask, narrow_pair(low, high));
  }
}

int64_t cut(int64_t units, int64_t piece, int64_t pieces, int64_t unit, int64_t end) {
  const int64_t at = units * piece / pieces * unit;
  return at < end ? at : end;
}

// Few blocks for many threads: pack, then each product in pieces.
void run_pieces(const Range& range, int64_t pieces, char* panels, char* acts, char* space) {
  const Experts& p = range.problem;
  const Plan& plan = range.plan;
  const int64_t tasks = plan.block_count * pieces;
#pragma omp for schedule(dynamic, 1)
  for (int64_t b = 0; b < plan.block_count; ++b) {
    pack(range, plan.blocks[b], panels + range.panel_bytes(range.first_tile(b)));
  }
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    if (space == nullptr) continue;
    const int64_t b = task / pieces, piece = task % pieces, first = range.first_tile(b);
    const int64_t from = cut(range.inner_blocks, piece, pieces, kStep, p.intermediate);
    const int64_t to = cut(range.inner_blocks, piece + 1, pieces, kStep, p.intermediate);
    up(range, plan.blocks[b], panels + range.panel_bytes(first), acts + range.act_bytes(first), from, to, space);
  }
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t task = 0; task < tasks; ++task) {
    if (space == nullptr) continue;
    const int64_t b = task / pieces, piece = task % pieces;
    const int64_t from = cut(range.hidden_blocks, piece, pieces, kStep, p.hidden);
    const int64_t to = cut(range.hidden_blocks, piece + 1, pieces, kStep, p.hidden);
    down(range, plan.blocks[b], acts + range.act_bytes(range.first_tile(b)), from, to, space);
  }
}

// Enough blocks: each is one thread's from the gathering to the last product.
void run_blocks(const Range& range, char* panel, char* act, char* space) {
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t b = 0; b < range.plan.block_count; ++b) {
    if (space == nullptr) continue;
    const Block& block = range.plan.blocks[b];
    pack(range, block, panel);
    up(range, block, panel, act, 0, range.problem.intermediate, space);
    down(range, block, act, 0, range.problem.hidden, space);
  }
}

int forward(const Experts& p) {
  const int64_t hidden_blocks = round_up(p.hidden, kStep) / kStep;
  const int64_t inner_blocks = round_up(p.intermediate, kStep) / kStep;
  Range range = {p, {}, hidden_blocks, inner_blocks, nullptr, false};
  // a block's packed tokens should stay in the second-level cache
  int64_t most = (512 << 10) / (hidden_blocks * kStep * 2) / 32 * 32;
  most = most < 64 ? 64 : (most > kMostRows ? kMostRows : most);
  const int status = make_plan(p, static_cast<int>(most), 32, &range.plan);
  if (status != MOEMB_OK) return status;

  const Plan& plan = range.plan;
  const double size = 6.0 * p.hidden * p.intermediate;
  const int threads = threads_for(size * plan.pairs, size * plan.block_count, p.dtype);
  const int64_t pieces = pieces_for(plan.block_count, threads, inner_blocks);
  const size_t output_bytes = size_t(p.tokens) * p.slots * p.hidden * 2;
  range.outputs = static_cast<Bf16*>(workspace(kOutputSpace, output_bytes));
  range.stream = p.hidden % 32 == 0 && output_bytes > (size_t(16) << 20);
  const int64_t shared_tiles = pieces > 1 ? plan.pairs / kTileRows + plan.block_count : 0;
  const size_t shared_bytes = range.panel_bytes(shared_tiles) + range.act_bytes(shared_tiles);
  char* shared = static_cast<char*>(workspace(kSharedSpace, shared_bytes));
  if (range.outputs == nullptr || shared == nullptr) return MOEMB_NO_MEMORY;

  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    const int64_t own_tiles = pieces > 1 ? 0 : most / kTileRows;
    const int64_t own = range.panel_bytes(own_tiles) + range.act_bytes(own_tiles);
    char* panel = static_cast<char*>(workspace(kPanelSpace, own + kMultiplySpace));
    if (panel == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
    char* space = panel == nullptr ? nullptr : panel + own;
    // Threads meet as rarely as they can: each meeting waits for one that another process keeps from running. So one
    // without memory takes its turns, too, and leaves them undone.
    if (pieces > 1) {
      run_pieces(range, pieces, shared, shared + range.panel_bytes(shared_tiles), space);
    } else {
      run_blocks(range, panel, panel + range.panel_bytes(own_tiles), space);
    }
    if (range.stream) _mm_sfence();
#pragma omp barrier
#pragma omp for schedule(dynamic, kCombined) nowait
    for (int64_t token = 0; token < p.tokens; ++token) {
      combine(p, range.outputs, static_cast<Bf16*>(p.output), token);
    }
  }
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace

int experts_forward_amx(const Experts& problem) { return forward(problem); }

}  // namespace moemb

// What the forward and the backward of attention share: products in registers, packing of rows, the list of tasks.
//
// Scores are computed transposed, keys by queries: keys and values are then read where they lie, the statistics of the
// softmax are whole vectors (a lane per query), and a key head's queries share its keys. A lane is a (query, head)
// pair, lane = query * repeat + head: consecutive heads of a token lie side by side in memory.
#pragma once

#include "rows_simd.h"

namespace moemb {
namespace {

constexpr int64_t kKeyBlock = 64;    // keys per step of the online softmax
constexpr int64_t kLaneBlock = 64;   // lanes per step: scores of 64 x 64 floats stay in the L1 cache
constexpr int64_t kTaskLanes = 128;  // lanes that share one conversion of the keys and values

// c[row][column] (+)= sum over k of a[row * a_row + k * a_k] * b[k * b_row + column], 16 * vectors columns. Each
// element is one chain of fused multiply-adds in the order of k: its bits do not depend on the blocking of the rows.
template <int kRows, int kVectors>
void product_tile(const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, int64_t count, float* c,
                  int64_t c_row, bool accumulate) {
  Vec sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[row][v] = accumulate ? load(c + row * c_row + v * kLanes) : zeros();
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_row + v * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vec left = splat(a[row * a_row + k * a_k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fma(left, right[v], sums[row][v]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + row * c_row + v * kLanes, sums[row][v]);
  }
}

struct Product {
  const float* a;
  int64_t a_row, a_k;
  const float* b;
  int64_t b_row;
  int64_t count;
  float* c;
  int64_t c_row;
  bool accumulate;
};

template <int kRows, int kVectors>
void last_rows(const Product& p, int64_t row, int64_t rows, int64_t column) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      product_tile<kRows, kVectors>(p.a + row * p.a_row, p.a_row, p.a_k, p.b + column, p.b_row, p.count,
                                    p.c + row * p.c_row + column, p.c_row, p.accumulate);
    } else {
      last_rows<kRows - 1, kVectors>(p, row, rows, column);
    }
  }
}

template <int kRows, int kVectors>
void product_columns(const Product& p, int64_t rows, int64_t column) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) last_rows<kRows, kVectors>(p, row, kRows, column);
  last_rows<kRows - 1, kVectors>(p, row, rows - row, column);
}

// `columns` is a multiple of 16.
[[maybe_unused]] void product(const Product& p, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) product_columns<6, 4>(p, rows, column);
  switch ((columns - column) / kLanes) {
    case 3:
      return product_columns<8, 3>(p, rows, column);
    case 2:
      return product_columns<12, 2>(p, rows, column);
    case 1:
      return product_columns<12, 1>(p, rows, column);
  }
}

// Rows of `dim` features as fp32 times `factor`, padded with zeros to `padded` features.
template <typename T>
void widen_row(const T* source, int64_t dim, int64_t padded, float factor, float* target) {
  for (int64_t column = 0; column < padded; column += kLanes) {
    store(target + column, mul(load(source + column, tail(dim - column)), splat(factor)));
  }
}

// target[column][lane] = rows[lane][column], both padded to whole vectors.
inline void transpose_rows(const float* rows, int64_t lanes, int64_t padded, float* target, int64_t target_row) {
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    for (int64_t column = 0; column < padded; column += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(rows + (lane + i) * padded + column);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(target + (column + i) * target_row + lane, block[i]);
    }
  }
}

// Keys or values of one head: fp32 rows with whole vectors are read where they lie, others are widened to scratch.
struct HeadRows {
  const float* rows;
  int64_t stride;
};

template <typename T>
HeadRows head_rows(const T* source, int64_t stride, int64_t count, int64_t dim, int64_t padded, float* scratch) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dim == padded) return {source, stride};
  }
  for (int64_t row = 0; row < count; ++row) {
    widen_row(source + row * stride, dim, padded, 1.0f, scratch + row * padded);
  }
  return {scratch, padded};
}

// Adds -inf where the key (its position in the segment) lies after the query of the lane.
inline Vec hide_future(Vec scores, int64_t key, __m512i query_positions) {
  const Mask future = _mm512_cmplt_epi32_mask(query_positions, _mm512_set1_epi32(static_cast<int>(key)));
  return _mm512_mask_mov_ps(scores, future, splat(-__builtin_inff()));
}

// Positions of the queries of 16 lanes.
inline __m512i lane_positions(int64_t first_query, int64_t lane, int64_t repeat, int64_t queries) {
  alignas(64) int32_t positions[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int64_t query = (lane + i) / repeat;
    positions[i] = static_cast<int32_t>(first_query + smaller(query, queries - 1));
  }
  return _mm512_load_si512(positions);
}

// Queries per task, a function of the heads alone.
inline int64_t task_queries(const MoembAttention& inputs) {
  const int64_t queries = kTaskLanes * inputs.key_heads / inputs.heads;
  return queries < 1 ? 1 : queries;
}

struct Task {
  int64_t start, length;   // of the segment's keys
  int64_t query, queries;  // position of the first query in the segment, and their number
  int64_t key_head;
  int64_t origin;  // the row of the query at position 0, which there may not be: then negative or a neighbour's
};

// What a block of lanes sees of `count` keys.
struct Window {
  int64_t visible;           // the first so many keys; none when it is not positive
  const __m512i* positions;  // of the queries, when some of these keys must be hidden from some lane
  __m512i stored[kLaneBlock / kLanes];
};

// The window of `rows` lanes from `lane` on (`width` with padding) over the keys `first` .. `first + count`.
inline void set_window(const Task& task, bool causal, int64_t first, int64_t count, int64_t lane, int64_t rows,
                       int64_t width, int64_t repeat, Window& window) {
  window.visible = count, window.positions = nullptr;
  if (!causal) return;
  window.visible = smaller(count, task.query + (lane + rows - 1) / repeat + 1 - first);
  if (window.visible <= 0 || first + window.visible - 1 <= task.query + lane / repeat) return;
  for (int64_t v = 0; v < width / kLanes; ++v) {
    window.stored[v] = lane_positions(task.query, lane + v * kLanes, repeat, task.queries);
  }
  window.positions = window.stored;
}

// The keys of a segment: those of its queries unless there are more.
inline int64_t first_key(const MoembAttention& inputs, int64_t segment) {
  return (inputs.cu_keys != nullptr ? inputs.cu_keys : inputs.cu_seqlens)[segment];
}

inline int64_t key_count(const MoembAttention& inputs, int64_t segment) {
  return first_key(inputs, segment + 1) - first_key(inputs, segment);
}

// Whether the cumulative lengths describe `tokens` rows, and no segment has fewer keys than queries.
inline bool valid_segments(const MoembAttention& inputs) {
  const int32_t* ends = inputs.cu_seqlens;
  if (inputs.segments < 0 || ends[0] != 0 || ends[inputs.segments] != inputs.tokens) return false;
  for (int64_t segment = 0; segment < inputs.segments; ++segment) {
    if (ends[segment + 1] < ends[segment]) return false;
    if (key_count(inputs, segment) < ends[segment + 1] - ends[segment]) return false;
  }
  if (inputs.cu_keys != nullptr) return inputs.cu_keys[0] == 0 && inputs.cu_keys[inputs.segments] == inputs.keys;
  return true;
}

// Fills `tasks` with blocks of at most `queries` queries of every segment and key head, or only counts them (null).
inline int64_t list_tasks(const MoembAttention& inputs, int64_t queries, Task* tasks) {
  int64_t count = 0;
  for (int64_t segment = 0; segment < inputs.segments; ++segment) {
    const int64_t start = first_key(inputs, segment), length = key_count(inputs, segment);
    const int64_t before = length - (inputs.cu_seqlens[segment + 1] - inputs.cu_seqlens[segment]);
    const int64_t origin = inputs.cu_seqlens[segment] - before;
    for (int64_t query = before; query < length; query += queries) {
      for (int64_t head = 0; head < inputs.key_heads; ++head, ++count) {
        if (tasks != nullptr) tasks[count] = {start, length, query, smaller(queries, length - query), head, origin};
      }
    }
  }
  return count;
}

// Multiply-adds of the scores, to decide whether threads pay.
inline int64_t score_work(const MoembAttention& inputs) {
  int64_t pairs = 0;
  for (int64_t segment = 0; segment < inputs.segments; ++segment) {
    const int64_t length = inputs.cu_seqlens[segment + 1] - inputs.cu_seqlens[segment];
    pairs += length * key_count(inputs, segment);
  }
  return pairs * inputs.heads * inputs.dim;
}

constexpr int64_t kSerialWork = 1 << 19;

}  // namespace
}  // namespace moemb

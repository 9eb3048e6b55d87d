// Products on AVX-512 in fp32; bf16 and fp16 operands are widened as they are packed.
//
// `tile` multiplies 8 rows of A, element by element broadcast, with 16, 32 or 48 columns of a packed panel.
//
//   forward   A = rows of the weights (fp32: in place); panel = tokens, packed while they are gathered.
//   backward  A = gathered rows of tokens; panel = columns of the weights, packed 48 at a time.
//
//
// For up to four tokens `few` reads 16 weight rows as they lie and turns them in registers: a panel of mostly empty
// columns would make such products slower than reading the weights.
//
// The sum over k is one chain of fused multiply-adds from the first k to the last, whatever the numbers of rows and
// columns, so a token's result depends on nothing but that token.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace moemb {
namespace {

constexpr int kRows = 8;         // of a tile
constexpr int kColumns = 48;     // at most
constexpr int kGroup = 16;       // weight rows whose results are transposed together
constexpr int kMostTokens = 192; // of a block


inline void fetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }

// targets[row][16 Vectors] = sum over k of rows[row][k] * panel[k][16 Vectors]. Rows 4 .. 7 go to `second`. `ahead`
// elements behind the rows lie those that come next and are fetched meanwhile; 0: none.
template <int Vectors>
inline void tile(const float* const rows[kRows], int64_t depth, const float* panel, int64_t ahead, float* first,
                 float* second) {
  Vec sums[kRows][Vectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) sums[row][v] = zeros();
  }
  const float *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  const float *r4 = rows[4], *r5 = rows[5], *r6 = rows[6], *r7 = rows[7];
  for (int64_t k = 0; k < depth; ++k, panel += kLanes * Vectors) {
    if (ahead != 0 && k % kLanes == 0) {
      for (int row = 0; row < kRows; ++row) fetch(rows[row] + ahead + k);
    }
    Vec b[Vectors];
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) b[v] = _mm512_load_ps(panel + v * kLanes);
    const float a[kRows] = {r0[k], r1[k], r2[k], r3[k], r4[k], r5[k], r6[k], r7[k]};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec value = splat(a[row]);
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) sums[row][v] = fma(value, b[v], sums[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    float* target = row < 4 ? first + row * kColumns : second + (row - 4) * kColumns;
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) _mm512_store_ps(target + v * kLanes, sums[row][v]);
  }
}

inline void any_tile(int vectors, const float* const rows[kRows], int64_t depth, const float* panel, int64_t ahead,
                     float* first, float* second) {
  if (vectors == 3) tile<3>(rows, depth, panel, ahead, first, second);
  else if (vectors == 2) tile<2>(rows, depth, panel, ahead, first, second);
  else tile<1>(rows, depth, panel, ahead, first, second);
}

// ---- packing ------------------------------------------------------------------------------------------------------

// Rows `first` .. `first + count` of a matrix as fp32 rows, the last existing one (`valid` exist) repeated behind the
// end: results of such rows are never used.
inline void weight_rows(const float* matrix, int64_t width, int64_t valid, int64_t count, float*,
                        const float** rows) {
  for (int64_t row = 0; row < count; ++row) rows[row] = matrix + (row < valid ? row : valid - 1) * width;
}

template <class T>
inline void weight_rows(const T* matrix, int64_t width, int64_t valid, int64_t count, float* scratch,
                        const float** rows) {
  for (int64_t row = 0; row < count; ++row) {
    const T* source = matrix + (row < valid ? row : valid - 1) * width;
    rows[row] = scratch + row * width;
    for (int64_t k = 0; k < width; k += kLanes) {
      const Mask mask = tail(width - k);
      store(scratch + row * width + k, load(source + k, mask), mask);
    }
  }
}

// Pack up to 48 rows (null: zeros) of `width` values into a panel: columns are the rows.
template <class T>
inline void pack_tokens(const T* const* rows, int vectors, int64_t width, float* panel) {
  for (int v = 0; v < vectors; ++v) {
    for (int64_t k = 0; k < width; k += kLanes) {
      const Mask mask = tail(width - k);
      Vec lines[kLanes];
      for (int row = 0; row < kLanes; ++row) {
        const T* source = rows[v * kLanes + row];
        lines[row] = source == nullptr ? zeros() : load(source + k, mask);
      }
      transpose(lines);
      const int64_t count = width - k < kLanes ? width - k : kLanes;
      for (int64_t row = 0; row < count; ++row) {
        _mm512_store_ps(panel + ((k + row) * vectors + v) * kLanes, lines[row]);
      }
    }
  }
}

// Pack `columns` (at most 48) columns of `depth` rows of a weight matrix into a panel of 16 `vectors` columns.
template <class T>
inline void pack_columns(const T* source, int64_t stride, int64_t depth, int64_t columns, int vectors, float* panel) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int v = 0; v < vectors; ++v) {
      const Vec line = load(source + k * stride + v * kLanes, tail(columns - v * kLanes));
      _mm512_store_ps(panel + (k * vectors + v) * kLanes, line);
    }
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

inline int vectors_of(int64_t columns) {
  return columns >= kColumns ? 3 : static_cast<int>((columns + kLanes - 1) / kLanes);
}

// How far behind a group of weight rows the next one lies; 0 where rows are copied.
template <class T>
inline int64_t next_rows(int64_t width) {
  return sizeof(T) == sizeof(float) ? kGroup * width : 0;
}

// Tokens of one block as panels of up to 48 each.
struct Panels {
  float* memory;
  int64_t tokens, width;

  int count() const { return static_cast<int>((tokens + kColumns - 1) / kColumns); }
  int vectors(int number) const { return vectors_of(tokens - number * kColumns); }
  float* at(int number) const { return memory + number * kColumns * width; }
  static int64_t floats(int64_t tokens, int64_t width) { return round_up(tokens, kLanes) * width; }
};

// rows = tokens * weights^T + bias for weight rows `from` .. `to` in units of 16. `scratch` holds 16 rows of weights.
template <class T>
inline void multiply_rows(const T* weight, int64_t outputs, const T* bias, const Panels& panels, int64_t from,
                          int64_t to, T* const* targets, float* scratch) {
  const int64_t width = panels.width;
  alignas(64) float sums[kGroup * kColumns];
  for (int64_t n = from * kGroup; n < to * kGroup && n < outputs; n += kGroup) {
    const float* rows[kGroup];
    weight_rows(weight + n * width, width, outputs - n, kGroup, scratch, rows);
    const Mask mask = tail(outputs - n);
    const Vec shift = bias == nullptr ? zeros() : load(bias + n, mask);
    for (int number = 0; number < panels.count(); ++number) {
      const int vectors = panels.vectors(number);
      const int64_t ahead = number == 0 ? next_rows<T>(width) : 0;
      any_tile(vectors, rows, width, panels.at(number), ahead, sums, sums + 4 * kColumns);
      any_tile(vectors, rows + kRows, width, panels.at(number), ahead, sums + 8 * kColumns, sums + 12 * kColumns);
      for (int v = 0; v < vectors; ++v) {
        Vec lines[kLanes];
        for (int row = 0; row < kLanes; ++row) lines[row] = _mm512_load_ps(sums + row * kColumns + v * kLanes);
        transpose(lines);
        T* const* target = targets + number * kColumns + v * kLanes;
        for (int row = 0; row < kLanes && target[row] != nullptr; ++row) {
          store(target[row] + n, add(lines[row], shift), mask);
        }
      }
    }
  }
}

// rows = tokens * weights for columns `from` .. `to` of the weights in units of 48. `tokens` are `total` rows of
// `depth` fp32 values; `write(row, column, sums)` gets 16 sums of one row. `panel` holds `depth` x 48 floats.
template <class T, class Write>
inline void multiply_columns(const T* weight, int64_t depth, int64_t width, const float* tokens, int64_t total,
                             int64_t from, int64_t to, float* panel, Write write) {
  alignas(64) float sums[kRows * kColumns];
  for (int64_t column = from * kColumns; column < to * kColumns && column < width; column += kColumns) {
    const int vectors = vectors_of(width - column);
    pack_columns(weight + column, width, depth, width - column, vectors, panel);
    for (int64_t row = 0; row < total; row += kRows) {
      const float* rows[kRows];
      weight_rows(tokens + row * depth, depth, total - row, kRows, nullptr, rows);
      any_tile(vectors, rows, depth, panel, 0, sums, sums + 4 * kColumns);
      for (int64_t i = 0; i < kRows && row + i < total; ++i) {
        for (int v = 0; v < vectors; ++v) write(row + i, column + v * kLanes, load(sums + i * kColumns + v * kLanes));
      }
    }
  }
}

// Copy a row of `width` values as fp32.
template <class T>
inline void widen_row(const T* source, int64_t width, float* target) {
  for (int64_t k = 0; k < width; k += kLanes) {
    const Mask mask = tail(width - k);
    store(target + k, load(source + k, mask), mask);
  }
}

// Rows of a block, so that its packed tokens take at most 768 KB.
inline int64_t block_tokens(int64_t width) {
  const int64_t tokens = (768 << 10) / (width * 4) / kColumns * kColumns;
  return tokens < kColumns ? kColumns : (tokens > kMostTokens ? kMostTokens : tokens);
}

// ---- few tokens ---------------------------------------------------------------------------------------------------

constexpr int kFew = 4;

// sums[token] = 16 sums over k of matrix[row][k] * tokens[token][k], one per row; the last of `valid` rows is repeated.
// Products and their order are those of `tile`.
template <int Tokens, class T>
inline void few(const T* matrix, int64_t width, int64_t valid, const float* const* tokens, Vec sums[Tokens]) {
  for (int token = 0; token < Tokens; ++token) sums[token] = zeros();
  for (int64_t k = 0; k < width; k += kLanes) {
    const Mask mask = tail(width - k);
    Vec columns[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      const T* source = matrix + (row < valid ? row : valid - 1) * width + k;
      fetch(source + kGroup * width);
      columns[row] = load(source, mask);
    }
    transpose(columns);
    if (width - k >= kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 4
        for (int token = 0; token < Tokens; ++token) {
          sums[token] = fma(columns[i], splat(tokens[token][k + i]), sums[token]);
        }
      }
      continue;
    }
    for (int64_t i = 0; i < width - k; ++i) {
      for (int token = 0; token < Tokens; ++token) {
        sums[token] = fma(columns[i], splat(tokens[token][k + i]), sums[token]);
      }
    }
  }
}

template <class T>
inline void any_few(int64_t count, const T* matrix, int64_t width, int64_t valid, const float* const* tokens,
                    Vec sums[kFew]) {
  switch (count) {
    case 1: return few<1>(matrix, width, valid, tokens, sums);
    case 2: return few<2>(matrix, width, valid, tokens, sums);
    case 3: return few<3>(matrix, width, valid, tokens, sums);
    default: return few<4>(matrix, width, valid, tokens, sums);
  }
}

// As multiply_rows, for `count` <= 4 tokens of `width` fp32 values.
template <class T>
inline void multiply_few(const T* weight, int64_t outputs, const T* bias, const float* const* tokens, int64_t count,
                         int64_t width, int64_t from, int64_t to, T* const* targets) {
  for (int64_t n = from * kGroup; n < to * kGroup && n < outputs; n += kGroup) {
    const Mask mask = tail(outputs - n);
    const Vec shift = bias == nullptr ? zeros() : load(bias + n, mask);
    Vec sums[kFew];
    any_few(count, weight + n * width, width, outputs - n, tokens, sums);
    for (int64_t token = 0; token < count; ++token) store(targets[token] + n, add(sums[token], shift), mask);
  }
}

}  // namespace
}  // namespace moemb

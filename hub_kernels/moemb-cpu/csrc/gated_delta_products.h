// Matrix products and triangular solves on small fp32 blocks that lie in the cache: the inner loops of the gated delta
// rule. One operand is read as broadcast elements with free strides (so its transpose costs nothing), the other as rows
// of whole vectors. Every element of a result is summed in the order of the inner index, whatever the blocking.
#pragma once

#include "simd.h"

namespace moemb {
namespace {

// Element (r, j) is data[r * row + j * step].
struct Left {
  const float* data;
  int64_t row, step;
};

// Row j starts at data + j * row; columns are contiguous.
struct Right {
  const float* data;
  int64_t row;
};

// Which inner indices j of row r are summed; the left operand holds zeros for others of the same block of rows.
enum class Inner { kAll, kUpToRow, kFromRow };

// out[r][:] = scale[r] * sum_j left(r, j) right[j][:] + keep * out[r][:]
struct Product {
  int rows, inner, columns;  // columns: a multiple of 16
  Left left;
  Right right;
  float* out;
  int64_t out_row;
  Inner range = Inner::kAll;
  bool lower_only = false;       // leave out the blocks of 16 columns right of the diagonal
  const float* scale = nullptr;  // null: 1
  float keep = 0.0f;             // 0: `out` is not read
};

// Rows per register block for `width` vectors of columns: the accumulators fill most of the 32 registers.
constexpr int block_rows(int width) { return width == 4 ? 6 : width == 3 ? 8 : 12; }

template <int kRows, int kWidth>
__attribute__((noinline)) void product_block(const Product& p, int row, int column, int begin, int end) {
  Vec sums[kRows][kWidth];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) sums[r][v] = zeros();
  }
  const float* left = p.left.data + row * p.left.row + begin * p.left.step;
  const float* right = p.right.data + begin * p.right.row + column;
  const int64_t left_row = p.left.row, left_step = p.left.step, right_row = p.right.row;
  for (int j = begin; j < end; ++j, left += left_step, right += right_row) {
    Vec columns[kWidth];
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) columns[v] = load(right + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(left[r * left_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) sums[r][v] = fma(factor, columns[v], sums[r][v]);
    }
  }
  float* out = p.out + row * p.out_row + column;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = splat(p.scale != nullptr ? p.scale[row + r] : 1.0f);
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
      float* target = out + r * p.out_row + v * kLanes;
      const Vec value = mul(scale, sums[r][v]);
      store(target, p.keep != 0.0f ? fma(splat(p.keep), load(target), value) : value);
    }
  }
}

template <int kWidth, int kRows = block_rows(kWidth)>
void product_rows(const Product& p, int count, int row, int column, int begin, int end) {
  if (count == kRows) {
    product_block<kRows, kWidth>(p, row, column, begin, end);
  } else if constexpr (kRows > 1) {
    product_rows<kWidth, kRows - 1>(p, count, row, column, begin, end);
  }
}

template <int kWidth>
void product_panel(const Product& p, int column) {
  int row = 0;
  if (p.lower_only) row = column < p.rows ? column : p.rows;
  // blocks of nearly equal height: a last block of one row would wait for its own additions
  for (int blocks = (p.rows - row + block_rows(kWidth) - 1) / block_rows(kWidth); blocks > 0; --blocks) {
    const int count = (p.rows - row + blocks - 1) / blocks;
    const int begin = p.range == Inner::kFromRow ? row : 0;
    const int end = p.range == Inner::kUpToRow && row + count < p.inner ? row + count : p.inner;
    product_rows<kWidth>(p, count, row, column, begin, end);
    row += count;
  }
}

inline void product(const Product& p) {
  // a panel of the right operand stays in the first cache while all rows pass; triangles want narrow panels
  const int widest = p.lower_only ? 2 : 4;
  for (int column = 0; column < p.columns;) {
    int width = (p.columns - column) / kLanes;
    if (width > widest) width = widest;
    switch (width) {
      case 4:
        product_panel<4>(p, column);
        break;
      case 3:
        product_panel<3>(p, column);
        break;
      case 2:
        product_panel<2>(p, column);
        break;
      default:
        product_panel<1>(p, column);
    }
    column += width * kLanes;
  }
}

// Solves t_r = x_r - sum_{j<r} system(r, j) s_j with s_j = step[j] t_j, row by row. `x` becomes t. Strides may be
// negative: the transposed system is solved from the last row to the first.
struct Solve {
  int rows, columns;  // columns: a multiple of 16
  Left system;
  const float* step;
  int64_t step_stride;
  float* x;
  float* scaled;  // s; rows as far apart as those of x
  int64_t row;
};

constexpr int solve_rows(int width) { return width == 4 ? 6 : 8; }

template <int kRows, int kWidth>
__attribute__((noinline)) void solve_block(const Solve& p, int row, int column) {
  Vec rest[kRows][kWidth];
  float* x = p.x + row * p.row + column;
  float* scaled = p.scaled + row * p.row + column;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) rest[r][v] = load(x + r * p.row + v * kLanes);
  }
  const float* system = p.system.data + row * p.system.row;
  const float* known = p.scaled + column;
  const int64_t system_row = p.system.row, system_step = p.system.step, known_row = p.row;
  for (int j = 0; j < row; ++j, system += system_step, known += known_row) {
    Vec columns[kWidth];
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) columns[v] = load(known + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(system[r * system_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) rest[r][v] = fnma(factor, columns[v], rest[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i, system += system_step) {
    const Vec step = splat(p.step[(row + i) * p.step_stride]);
    Vec solved[kWidth];
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
      solved[v] = mul(step, rest[i][v]);
      store(x + i * p.row + v * kLanes, rest[i][v]);
      store(scaled + i * p.row + v * kLanes, solved[v]);
    }
#pragma GCC unroll 8
    for (int r = i + 1; r < kRows; ++r) {
      const Vec factor = splat(system[r * system_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) rest[r][v] = fnma(factor, solved[v], rest[r][v]);
    }
  }
}

template <int kWidth, int kRows = solve_rows(kWidth)>
void solve_some(const Solve& p, int count, int row, int column) {
  if (count == kRows) {
    solve_block<kRows, kWidth>(p, row, column);
  } else if constexpr (kRows > 1) {
    solve_some<kWidth, kRows - 1>(p, count, row, column);
  }
}

template <int kWidth>
void solve_panel(const Solve& p, int column) {
  int row = 0;
  for (int blocks = (p.rows + solve_rows(kWidth) - 1) / solve_rows(kWidth); blocks > 0; --blocks) {
    const int count = (p.rows - row + blocks - 1) / blocks;
    solve_some<kWidth>(p, count, row, column);
    row += count;
  }
}

inline void solve(const Solve& p) {
  for (int column = 0; column < p.columns;) {
    const int left = (p.columns - column) / kLanes;
    const int width = left > 4 ? 4 : left;
    switch (width) {
      case 4:
        solve_panel<4>(p, column);
        break;
      case 3:
        solve_panel<3>(p, column);
        break;
      case 2:
        solve_panel<2>(p, column);
        break;
      default:
        solve_panel<1>(p, column);
    }
    column += width * kLanes;
  }
}

// target[c][r] = source[r][c] for `columns` (a multiple of 16); rows of target end in zeros up to a multiple of 16.
inline void transpose_block(const float* source, int64_t source_row, int rows, int columns, float* target,
                            int64_t target_row) {
  for (int r = 0; r < rows; r += kLanes) {
    const int present = rows - r < kLanes ? rows - r : kLanes;
    for (int c = 0; c < columns; c += kLanes) {
      Vec tile[kLanes];
      for (int i = 0; i < kLanes; ++i) tile[i] = i < present ? load(source + (r + i) * source_row + c) : zeros();
      transpose(tile);
      for (int i = 0; i < kLanes; ++i) store(target + (c + i) * target_row + r, tile[i]);
    }
  }
}

}  // namespace
}  // namespace moemb

// RMS norms, forward and backward. Arithmetic is fp32; a row's bits depend on that row alone.
//
// The backward recomputes the root mean square instead of reading a saved one: both sums it needs, of x^2 and of the
// gradient along x, come out of one pass over the row.
#include <math.h>

#include "rows_simd.h"

namespace moemb {
namespace {

// How many blocks the rows are cut into for the gradient of a weight; must not depend on the number of threads.
constexpr int64_t kMaxBlocks = 64;
constexpr int64_t kMinBlockRows = 32;

struct Blocks {
  int64_t count, rows;
};

Blocks weight_blocks(int64_t rows) {
  const int64_t size = ceil_div(rows, kMaxBlocks);
  const int64_t block = size < kMinBlockRows ? kMinBlockRows : size;
  return {ceil_div(rows, block), block};
}

// weight + offset as fp32, padded with zeros to whole vectors
void read_weight(const void* weight, int32_t dtype, float offset, int64_t dim, float* target) {
  for (int64_t column = 0; column < dim; column += kLanes) {
    const Mask lanes = tail(dim - column);
    const Vec value = dtype == MOEMB_FP32 ? load(static_cast<const float*>(weight) + column, lanes)
                                          : load(static_cast<const Bf16*>(weight) + column, lanes);
    _mm512_storeu_ps(target + column, _mm512_maskz_add_ps(lanes, value, splat(offset)));
  }
}

inline float inverse_root(float square, int64_t dim, float eps) { return 1.0f / sqrtf(square / float(dim) + eps); }

template <typename In>
float sum_of_squares(const In* row, int64_t dim) {
  Vec sums[4] = {};
  int64_t column = 0;
  for (; column + 4 * kLanes <= dim; column += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      const Vec value = load(row + column + part * kLanes);
      sums[part] = fma(value, value, sums[part]);
    }
  }
  for (; column < dim; column += kLanes) {
    const Vec value = load(row + column, tail(dim - column));
    sums[0] = fma(value, value, sums[0]);
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <typename In, typename Out>
void norm_row(const In* row, const float* weight, int64_t dim, float eps, Out* output) {
  const Vec inverse = splat(inverse_root(sum_of_squares(row, dim), dim, eps));
  int64_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    const Vec unit = mul(load(row + column), inverse);
    store(output + column, mul(unit, load(weight + column)));
  }
  if (column < dim) {
    const Mask lanes = tail(dim - column);
    const Vec unit = mul(load(row + column, lanes), inverse);
    store(output + column, mul(unit, load(weight + column)), lanes);
  }
}

template <typename In, typename Out>
void norm_rows(const MoembRows& states, const float* weight, int64_t rows, int64_t dim, float eps, Out* output) {
#pragma omp parallel for schedule(static) if (rows * dim > kSerialElements)
  for (int64_t index = 0; index < rows; ++index) {
    norm_row(row_at<In>(states, index), weight, dim, eps, output + index * dim);
  }
}

// grad_weight, when wanted, is this block's running sum (padded to whole vectors)
template <typename In, typename Grad>
void norm_row_backward(const In* row, const float* weight, const Grad* grad, int64_t dim, float eps, In* grad_row,
                       float* grad_weight) {
  Vec squares[2] = {}, along[2] = {};
  for (int64_t column = 0, part = 0; column < dim; column += kLanes, part ^= 1) {
    const Mask lanes = tail(dim - column);
    const Vec value = load(row + column, lanes);
    const Vec scaled = mul(load(grad + column, lanes), load(weight + column));
    squares[part] = fma(value, value, squares[part]);
    along[part] = fma(value, scaled, along[part]);
  }
  const float inverse = inverse_root(sum(add(squares[0], squares[1])), dim, eps);
  const float mean = sum(add(along[0], along[1])) * inverse / float(dim);
  const Vec factor = splat(inverse), shift = splat(mean);
  for (int64_t column = 0; column < dim; column += kLanes) {
    const Mask lanes = tail(dim - column);
    const Vec unit = mul(load(row + column, lanes), factor);
    const Vec gradient = load(grad + column, lanes);
    const Vec scaled = mul(gradient, load(weight + column));
    store(grad_row + column, mul(fnma(unit, shift, scaled), factor), lanes);
    if (grad_weight) {
      store(grad_weight + column, fma(gradient, unit, load(grad_weight + column)));
    }
  }
}

// Runs `row(index, partial, spare)` over all rows. `partial`, null without `grad_weight`, is the running sum of a block
// of rows; the blocks are added in order. `spare` is a row of fp32 scratch.
template <typename Row>
int over_blocks(int64_t rows, int64_t dim, float* grad_weight, const Row& row) {
  const int64_t padded = round_up(dim, kLanes);
  const Blocks blocks = weight_blocks(rows);
  static thread_local Scratch scratch;
  float* const partials = scratch.floats(2 * blocks.count * padded + kLanes);
  if (partials == nullptr) return MOEMB_NO_MEMORY;
#pragma omp parallel for schedule(static) if (rows * dim > kSerialElements)
  for (int64_t block = 0; block < blocks.count; ++block) {
    float* const spare = partials + (blocks.count + block) * padded;
    float* const partial = grad_weight != nullptr ? partials + block * padded : nullptr;
    if (partial != nullptr) memset(partial, 0, padded * sizeof(float));
    const int64_t end = smaller((block + 1) * blocks.rows, rows);
    for (int64_t index = block * blocks.rows; index < end; ++index) row(index, partial, spare);
  }
  if (grad_weight == nullptr) return MOEMB_OK;
  memset(grad_weight, 0, dim * sizeof(float));
  for (int64_t block = 0; block < blocks.count; ++block) {
    for (int64_t column = 0; column < dim; ++column) grad_weight[column] += partials[block * padded + column];
  }
  return MOEMB_OK;
}

template <typename In, typename Grad>
int norm_rows_backward(const MoembRows& states, const float* weight, const MoembRows& grad, int64_t rows, int64_t dim,
                       float eps, In* grad_states, float* grad_weight) {
  return over_blocks(rows, dim, grad_weight, [&](int64_t index, float* partial, float*) {
    norm_row_backward(row_at<In>(states, index), weight, row_at<Grad>(grad, index), dim, eps, grad_states + index * dim,
                      partial);
  });
}

template <typename In, typename Gate>
void gated_row(const In* row, const Gate* gate, const float* weight, int64_t dim, float eps, Gate* output) {
  const Vec inverse = splat(inverse_root(sum_of_squares(row, dim), dim, eps));
  for (int64_t column = 0; column < dim; column += kLanes) {
    const Mask lanes = tail(dim - column);
    const Vec gates = load(gate + column, lanes);
    const Vec unit = mul(load(row + column, lanes), inverse);
    const Vec silu = mul(gates, quick_sigmoid(gates));
    store(output + column, mul(mul(unit, load(weight + column)), silu), lanes);
  }
}

template <typename In, typename Gate>
void gated_rows(const MoembRows& states, const MoembRows& gate, const float* weight, int64_t rows, int64_t dim,
                float eps, Gate* output) {
#pragma omp parallel for schedule(static) if (rows * dim * 4 > kSerialElements)
  for (int64_t index = 0; index < rows; ++index) {
    gated_row(row_at<In>(states, index), row_at<Gate>(gate, index), weight, dim, eps, output + index * dim);
  }
}

// `sigmoids` keeps a row of quick_sigmoid(gate) between the two passes
template <typename In, typename Gate>
void gated_row_backward(const In* row, const Gate* gate, const float* weight, const Gate* grad, int64_t dim, float eps,
                        In* grad_row, Gate* grad_gate, float* grad_weight, float* sigmoids) {
  Vec squares = zeros(), along = zeros();
  for (int64_t column = 0; column < dim; column += kLanes) {
    const Mask lanes = tail(dim - column);
    const Vec value = load(row + column, lanes), gates = load(gate + column, lanes);
    const Vec open = quick_sigmoid(gates);
    store(sigmoids + column, open);
    const Vec factor = mul(mul(gates, open), load(weight + column));
    squares = fma(value, value, squares);
    along = fma(mul(value, load(grad + column, lanes)), factor, along);
  }
  const float inverse = inverse_root(sum(squares), dim, eps);
  const Vec factor = splat(inverse);
  const Vec shift = splat(sum(along) * inverse / float(dim));
  for (int64_t column = 0; column < dim; column += kLanes) {
    const Mask lanes = tail(dim - column);
    const Vec unit = mul(load(row + column, lanes), factor);
    const Vec gates = load(gate + column, lanes), open = load(sigmoids + column);
    const Vec gradient = load(grad + column, lanes), scale = load(weight + column);
    const Vec silu = mul(gates, open), product = mul(gradient, unit);
    const Vec slope = silu_slope(gates, open);
    store(grad_gate + column, mul(mul(product, scale), slope), lanes);
    if (grad_weight) {
      store(grad_weight + column, fma(product, silu, load(grad_weight + column)));
    }
    const Vec scaled = mul(gradient, mul(silu, scale));
    store(grad_row + column, mul(fnma(unit, shift, scaled), factor), lanes);
  }
}

template <typename In, typename Gate>
int gated_rows_backward(const MoembRows& states, const MoembRows& gate, const float* weight, const MoembRows& grad,
                        int64_t rows, int64_t dim, float eps, In* grad_states, Gate* grad_gate, float* grad_weight) {
  return over_blocks(rows, dim, grad_weight, [&](int64_t index, float* partial, float* spare) {
    gated_row_backward(row_at<In>(states, index), row_at<Gate>(gate, index), weight, row_at<Gate>(grad, index), dim,
                       eps, grad_states + index * dim, grad_gate + index * dim, partial, spare);
  });
}

// The weight of this call as fp32; null when memory runs out.
const float* weight_row(const void* weight, int32_t dtype, float offset, int64_t dim) {
  static thread_local Scratch scratch;
  float* row = scratch.floats(round_up(dim, kLanes) + kLanes);
  if (row) read_weight(weight, dtype, offset, dim, row);
  return row;
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" {

int moemb_cpu_rms_norm(MoembRows states, const void* weight, int32_t weight_dtype, float offset, int64_t rows,
                       int64_t dim, float eps, void* output, int32_t output_dtype) {
  const float* scale = weight_row(weight, weight_dtype, offset, dim);
  if (!scale) return MOEMB_NO_MEMORY;
  const bool wide_in = states.dtype == MOEMB_FP32, wide_out = output_dtype == MOEMB_FP32;
  if (wide_in && wide_out) norm_rows<float>(states, scale, rows, dim, eps, static_cast<float*>(output));
  if (wide_in && !wide_out) norm_rows<float>(states, scale, rows, dim, eps, static_cast<Bf16*>(output));
  if (!wide_in && wide_out) norm_rows<Bf16>(states, scale, rows, dim, eps, static_cast<float*>(output));
  if (!wide_in && !wide_out) norm_rows<Bf16>(states, scale, rows, dim, eps, static_cast<Bf16*>(output));
  return MOEMB_OK;
}

int moemb_cpu_rms_norm_backward(MoembRows states, const void* weight, int32_t weight_dtype, float offset,
                                MoembRows grad_output, int64_t rows, int64_t dim, float eps, void* grad_states,
                                float* grad_weight) {
  const float* scale = weight_row(weight, weight_dtype, offset, dim);
  if (!scale) return MOEMB_NO_MEMORY;
  auto* wide = static_cast<float*>(grad_states);
  auto* narrow = static_cast<Bf16*>(grad_states);
  if (states.dtype == MOEMB_FP32) {
    return grad_output.dtype == MOEMB_FP32
               ? norm_rows_backward<float, float>(states, scale, grad_output, rows, dim, eps, wide, grad_weight)
               : norm_rows_backward<float, Bf16>(states, scale, grad_output, rows, dim, eps, wide, grad_weight);
  }
  return grad_output.dtype == MOEMB_FP32
             ? norm_rows_backward<Bf16, float>(states, scale, grad_output, rows, dim, eps, narrow, grad_weight)
             : norm_rows_backward<Bf16, Bf16>(states, scale, grad_output, rows, dim, eps, narrow, grad_weight);
}

int moemb_cpu_gated_rms_norm(MoembRows states, MoembRows gate, const void* weight, int32_t weight_dtype, int64_t rows,
                             int64_t dim, float eps, void* output) {
  const float* scale = weight_row(weight, weight_dtype, 0.0f, dim);
  if (!scale) return MOEMB_NO_MEMORY;
  const bool wide_in = states.dtype == MOEMB_FP32, wide_out = gate.dtype == MOEMB_FP32;
  if (wide_in && wide_out) gated_rows<float>(states, gate, scale, rows, dim, eps, static_cast<float*>(output));
  if (wide_in && !wide_out) gated_rows<float>(states, gate, scale, rows, dim, eps, static_cast<Bf16*>(output));
  if (!wide_in && wide_out) gated_rows<Bf16>(states, gate, scale, rows, dim, eps, static_cast<float*>(output));
  if (!wide_in && !wide_out) gated_rows<Bf16>(states, gate, scale, rows, dim, eps, static_cast<Bf16*>(output));
  return MOEMB_OK;
}

int moemb_cpu_gated_rms_norm_backward(MoembRows states, MoembRows gate, const void* weight, int32_t weight_dtype,
                                      MoembRows grad_output, int64_t rows, int64_t dim, float eps, void* grad_states,
                                      void* grad_gate, float* grad_weight) {
  const float* scale = weight_row(weight, weight_dtype, 0.0f, dim);
  if (!scale) return MOEMB_NO_MEMORY;
  auto* states_wide = static_cast<float*>(grad_states);
  auto* states_narrow = static_cast<Bf16*>(grad_states);
  auto* gate_wide = static_cast<float*>(grad_gate);
  auto* gate_narrow = static_cast<Bf16*>(grad_gate);
  if (states.dtype == MOEMB_FP32) {
    return gate.dtype == MOEMB_FP32 ? gated_rows_backward(states, gate, scale, grad_output, rows, dim, eps, states_wide,
                                                          gate_wide, grad_weight)
                                    : gated_rows_backward(states, gate, scale, grad_output, rows, dim, eps, states_wide,
                                                          gate_narrow, grad_weight);
  }
  return gate.dtype == MOEMB_FP32 ? gated_rows_backward(states, gate, scale, grad_output, rows, dim, eps, states_narrow,
                                                        gate_wide, grad_weight)
                                  : gated_rows_backward(states, gate, scale, grad_output, rows, dim, eps, states_narrow,
                                                        gate_narrow, grad_weight);
}

}  // extern "C"

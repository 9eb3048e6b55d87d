// SwiGLU and rotary embedding, forward and backward. Arithmetic is fp32, rounded once.
#include "rows_simd.h"

namespace moemb {
namespace {

template <typename T>
void swiglu_rows(const MoembRows& gate, const MoembRows& up, int64_t rows, int64_t dim, T* output) {
#pragma omp parallel for schedule(static) if (rows * dim * 2 > kSerialElements)
  for (int64_t index = 0; index < rows; ++index) {
    const T *gates = row_at<T>(gate, index), *ups = row_at<T>(up, index);
    T* target = output + index * dim;
    for (int64_t column = 0; column < dim; column += kLanes) {
      const Mask lanes = tail(dim - column);
      const Vec value = load(gates + column, lanes);
      const Vec silu = mul(value, quick_sigmoid(value));
      store(target + column, mul(silu, load(ups + column, lanes)), lanes);
    }
  }
}

template <typename T>
void swiglu_rows_backward(const MoembRows& gate, const MoembRows& up, const MoembRows& grad, int64_t rows, int64_t dim,
                          T* grad_gate, T* grad_up) {
#pragma omp parallel for schedule(static) if (rows * dim * 2 > kSerialElements)
  for (int64_t index = 0; index < rows; ++index) {
    const T *gates = row_at<T>(gate, index), *ups = row_at<T>(up, index), *grads = row_at<T>(grad, index);
    for (int64_t column = 0; column < dim; column += kLanes) {
      const Mask lanes = tail(dim - column);
      const Vec value = load(gates + column, lanes), gradient = load(grads + column, lanes);
      const Vec open = quick_sigmoid(value);
      const Vec slope = silu_slope(value, open);
      const Vec through_up = mul(gradient, load(ups + column, lanes));
      store(grad_gate + index * dim + column, mul(through_up, slope), lanes);
      store(grad_up + index * dim + column, mul(gradient, mul(value, open)), lanes);
    }
  }
}

struct Rotary {
  const float *cos, *sin;
  int64_t table_stride, tokens, heads, dim, rotary;
  bool backward;
};

template <typename In, typename Out>
void rotate_token(const MoembRows& states, const Rotary& shape, int64_t token, Out* output) {
  const int64_t half = shape.rotary / 2, heads = shape.heads, dim = shape.dim;
  const float* cos = shape.cos + token * shape.table_stride;
  const float* sin = shape.sin + token * shape.table_stride;
  for (int64_t column = 0; column < half; column += kLanes) {
    const Mask lanes = tail(half - column);
    const Vec cos_first = load(cos + column, lanes), cos_second = load(cos + half + column, lanes);
    // forward: first = x1 cos1 - x2 sin1, second = x2 cos2 + x1 sin2; backward: its transpose
    Vec sin_first = load(sin + column, lanes), sin_second = load(sin + half + column, lanes);
    if (shape.backward) {
      const Vec swapped = sin_first, zero = zeros();
      sin_first = sub(zero, sin_second);
      sin_second = sub(zero, swapped);
    }
    for (int64_t head = 0; head < heads; ++head) {
      const In* row = row_at<In>(states, token * heads + head) + column;
      Out* target = output + (token * heads + head) * dim + column;
      const Vec first = load(row, lanes), second = load(row + half, lanes);
      store(target, fnma(second, sin_first, mul(first, cos_first)), lanes);
      store(target + half, fma(first, sin_second, mul(second, cos_second)), lanes);
    }
  }
  for (int64_t head = 0; head < heads; ++head) {
    const In* row = row_at<In>(states, token * heads + head);
    Out* target = output + (token * heads + head) * dim;
    for (int64_t column = shape.rotary; column < dim; column += kLanes) {
      const Mask lanes = tail(dim - column);
      store(target + column, load(row + column, lanes), lanes);
    }
  }
}

template <typename In, typename Out>
void rotate_tokens(const MoembRows& states, const Rotary& shape, Out* output) {
#pragma omp parallel for schedule(static) if (shape.tokens * shape.heads * shape.dim > kSerialElements)
  for (int64_t token = 0; token < shape.tokens; ++token) rotate_token<In>(states, shape, token, output);
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" {

int moemb_cpu_swiglu(MoembRows gate, MoembRows up, int64_t rows, int64_t dim, void* output) {
  if (gate.dtype == MOEMB_FP32) {
    swiglu_rows(gate, up, rows, dim, static_cast<float*>(output));
  } else {
    swiglu_rows(gate, up, rows, dim, static_cast<Bf16*>(output));
  }
  return MOEMB_OK;
}

int moemb_cpu_swiglu_backward(MoembRows gate, MoembRows up, MoembRows grad_output, int64_t rows, int64_t dim,
                              void* grad_gate, void* grad_up) {
  if (gate.dtype == MOEMB_FP32) {
    swiglu_rows_backward(gate, up, grad_output, rows, dim, static_cast<float*>(grad_gate),
                         static_cast<float*>(grad_up));
  } else {
    swiglu_rows_backward(gate, up, grad_output, rows, dim, static_cast<Bf16*>(grad_gate), static_cast<Bf16*>(grad_up));
  }
  return MOEMB_OK;
}

int moemb_cpu_rotary(MoembRows states, const float* cos, const float* sin, int64_t table_stride, int64_t tokens,
                     int64_t heads, int64_t dim, int64_t rotary, int32_t backward, void* output, int32_t output_dtype) {
  const Rotary shape = {cos, sin, table_stride, tokens, heads, dim, rotary, backward != 0};
  const bool wide_in = states.dtype == MOEMB_FP32, wide_out = output_dtype == MOEMB_FP32;
  if (wide_in && wide_out) rotate_tokens<float>(states, shape, static_cast<float*>(output));
  if (wide_in && !wide_out) rotate_tokens<float>(states, shape, static_cast<Bf16*>(output));
  if (!wide_in && wide_out) rotate_tokens<Bf16>(states, shape, static_cast<float*>(output));
  if (!wide_in && !wide_out) rotate_tokens<Bf16>(states, shape, static_cast<Bf16*>(output));
  return MOEMB_OK;
}

}  // extern "C"

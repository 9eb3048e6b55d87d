// Arithmetic of an expert that both instruction sets share. Include it only from files compiled for AVX-512.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace moemb {
namespace {

// Gradients of 16 values of a = silu(gate) * up from the gradient of weight * a.
struct GateGradients {
  Vec gate, up;
  Vec activation;  // weight * a
  Vec weight;      // 16 terms of the weight's gradient
};

inline GateGradients gate_gradients(Vec gate, Vec up, Vec weight, Vec grad) {
  const Vec gated = sigmoid(gate), silu = mul(gate, gated);
  const Vec activation = mul(silu, up), scaled = mul(grad, weight);
  // silu'(x) = s + x s (1 - s)
  const Vec slope = fma(silu, sub(splat(1.0f), gated), gated);
  return {mul(mul(scaled, up), slope), mul(scaled, silu), mul(activation, weight), mul(activation, grad)};
}

// Add the rows of each token's slots, in order.
template <class T>
inline void combine(const Experts& p, const T* rows, T* output, int64_t token) {
  const int64_t* index = p.index + token * p.slots;
  for (int64_t h = 0; h < p.hidden; h += kLanes) {
    const Mask mask = tail(p.hidden - h);
    Vec total = zeros();
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      if (index[slot] == p.experts) continue;
      total = add(total, load(rows + (token * p.slots + slot) * p.hidden + h, mask));
    }
    store(output + token * p.hidden + h, total, mask);
  }
}

// The backward pass of one block: columns `column` .. `column + 16` of the row's gate and up, whose activation has the
// gradient `grad`. Writes the gradients to `row_grads` and, where wanted, to the problem's tensors.
template <class T, class Row>
inline Vec backward_columns(const Experts& p, int64_t pair, int64_t column, Vec grad, Row* row_grads) {
  const int64_t inner = p.intermediate;
  const Mask mask = tail(inner - column);
  const T* saved = static_cast<const T*>(p.saved) + pair * 2 * inner + column;
  const GateGradients g = gate_gradients(load(saved, mask), load(saved + inner, mask), splat(p.weight[pair]), grad);
  store(row_grads + column, g.gate, mask);
  store(row_grads + inner + column, g.up, mask);
  if (p.grad_saved != nullptr) {
    T* target = static_cast<T*>(p.grad_saved) + pair * 2 * inner + column;
    store(target, g.gate, mask);
    store(target + inner, g.up, mask);
  }
  if (p.activation != nullptr) store(static_cast<T*>(p.activation) + pair * inner + column, g.activation, mask);
  return _mm512_maskz_mov_ps(mask, g.weight);
}

inline void clear_skipped(const Experts& p) {
  for (int64_t pair = 0; pair < p.tokens * p.slots; ++pair) {
    if (p.index[pair] == p.experts) p.grad_weight[pair] = 0.0f;
  }
}

}  // namespace
}  // namespace moemb

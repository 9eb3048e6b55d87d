// Norms, SwiGLU, rotary embedding and the router.
#include "torch_binding.h"

namespace {

using moemb::check;
using moemb::Tensor;

// Leading axes as two levels; Python passes at most two of them, or a contiguous tensor.
MoembRows rows_of(const Tensor& tensor) {
  MoembRows rows = {tensor.data(), 1, 0, 0, tensor.dtype()};
  int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};
  int levels = 0;  // from the innermost axis outwards, joined where one stride steps through both
  for (int64_t axis = tensor.dim() - 2; axis >= 0; --axis) {
    const int64_t size = tensor.size(axis), stride = tensor.stride(axis);
    if (size == 1) continue;
    if (levels > 0 && stride == strides[levels - 1] * sizes[levels - 1]) {
      sizes[levels - 1] *= size;
      continue;
    }
    if (levels == 2) moemb::fail("rows", "more than two strides; pass a contiguous tensor");
    sizes[levels] = size;
    strides[levels] = stride;
    ++levels;
  }
  if (levels == 2) {
    rows.inner = sizes[0];
    rows.inner_stride = strides[0];
    rows.outer_stride = strides[1];
  } else {
    rows.outer_stride = strides[0];
  }
  return rows;
}

int64_t count_rows(const Tensor& tensor) {
  int64_t count = 1;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) count *= tensor.size(axis);
  return count;
}

// An empty tensor stands for a gradient that nobody wants.
float* wanted(const Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.out<float>(); }

void rms_norm(const Tensor& states, const Tensor& weight, double offset, double eps, const Tensor& output) {
  const int status =
      moemb_cpu_rms_norm(rows_of(states), weight.data(), weight.dtype(), static_cast<float>(offset), count_rows(states),
                         states.size(-1), static_cast<float>(eps), output.out(), output.dtype());
  check(status, "rms_norm");
}

void rms_norm_backward(const Tensor& states, const Tensor& weight, double offset, double eps, const Tensor& grad,
                       const Tensor& grad_states, const Tensor& grad_weight) {
  const int status = moemb_cpu_rms_norm_backward(
      rows_of(states), weight.data(), weight.dtype(), static_cast<float>(offset), rows_of(grad), count_rows(states),
      states.size(-1), static_cast<float>(eps), grad_states.out(), wanted(grad_weight));
  check(status, "rms_norm_backward");
}

void gated_rms_norm(const Tensor& states, const Tensor& gate, const Tensor& weight, double eps, const Tensor& output) {
  const int status =
      moemb_cpu_gated_rms_norm(rows_of(states), rows_of(gate), weight.data(), weight.dtype(), count_rows(states),
                               states.size(-1), static_cast<float>(eps), output.out());
  check(status, "gated_rms_norm");
}

void gated_rms_norm_backward(const Tensor& states, const Tensor& gate, const Tensor& weight, double eps,
                             const Tensor& grad, const Tensor& grad_states, const Tensor& grad_gate,
                             const Tensor& grad_weight) {
  const int status = moemb_cpu_gated_rms_norm_backward(
      rows_of(states), rows_of(gate), weight.data(), weight.dtype(), rows_of(grad), count_rows(states), states.size(-1),
      static_cast<float>(eps), grad_states.out(), grad_gate.out(), wanted(grad_weight));
  check(status, "gated_rms_norm_backward");
}

void swiglu(const Tensor& gate, const Tensor& up, const Tensor& output) {
  check(moemb_cpu_swiglu(rows_of(gate), rows_of(up), count_rows(gate), gate.size(-1), output.out()), "swiglu");
}

void swiglu_backward(const Tensor& gate, const Tensor& up, const Tensor& grad, const Tensor& grad_gate,
                     const Tensor& grad_up) {
  const int status = moemb_cpu_swiglu_backward(rows_of(gate), rows_of(up), rows_of(grad), count_rows(gate),
                                               gate.size(-1), grad_gate.out(), grad_up.out());
  check(status, "swiglu_backward");
}

void rotary(const Tensor& states, const Tensor& cos, const Tensor& sin, bool backward, const Tensor& output) {
  const int status =
      moemb_cpu_rotary(rows_of(states), cos.data<float>(), sin.data<float>(), cos.size(1), states.size(0),
                       states.size(1), states.size(2), cos.size(1), backward, output.out(), output.dtype());
  check(status, "rotary");
}

void top_k_router(const Tensor& logits, int64_t k, const Tensor& expert_index, const Tensor& weight) {
  const int status = moemb_cpu_top_k_router(logits.data<float>(), logits.stride(0), logits.size(0), logits.size(1), k,
                                            expert_index.out<int64_t>(), weight.out<float>());
  check(status, "top_k_router");
}

void top_k_router_backward(const Tensor& expert_index, const Tensor& weight, const Tensor& grad_weight,
                           const Tensor& grad_logits) {
  const int status = moemb_cpu_top_k_router_backward(
      expert_index.data<int64_t>(), weight.data<float>(), grad_weight.data<float>(), grad_logits.size(0),
      grad_logits.size(1), expert_index.size(1), grad_logits.out<float>());
  check(status, "top_k_router_backward");
}

}  // namespace

MOEMB_LIBRARY(rows) {
  ops.def("rms_norm(Tensor states, Tensor weight, float offset, float eps, Tensor(a!) out) -> ()");
  ops.cpu<rms_norm>("rms_norm");
  ops.def(
      "rms_norm_backward(Tensor states, Tensor weight, float offset, float eps, Tensor grad, Tensor(a!) grad_states, "
      "Tensor(b!) grad_weight) -> ()");
  ops.cpu<rms_norm_backward>("rms_norm_backward");
  ops.def("gated_rms_norm(Tensor states, Tensor gate, Tensor weight, float eps, Tensor(a!) out) -> ()");
  ops.cpu<gated_rms_norm>("gated_rms_norm");
  ops.def(
      "gated_rms_norm_backward(Tensor states, Tensor gate, Tensor weight, float eps, Tensor grad, "
      "Tensor(a!) grad_states, Tensor(b!) grad_gate, Tensor(c!) grad_weight) -> ()");
  ops.cpu<gated_rms_norm_backward>("gated_rms_norm_backward");
  ops.def("swiglu(Tensor gate, Tensor up, Tensor(a!) out) -> ()");
  ops.cpu<swiglu>("swiglu");
  ops.def("swiglu_backward(Tensor gate, Tensor up, Tensor grad, Tensor(a!) grad_gate, Tensor(b!) grad_up) -> ()");
  ops.cpu<swiglu_backward>("swiglu_backward");
  ops.def("rotary(Tensor states, Tensor cos, Tensor sin, bool backward, Tensor(a!) out) -> ()");
  ops.cpu<rotary>("rotary");
  ops.def("top_k_router(Tensor logits, int k, Tensor(a!) expert_index, Tensor(b!) weight) -> ()");
  ops.cpu<top_k_router>("top_k_router");
  ops.def(
      "top_k_router_backward(Tensor expert_index, Tensor weight, Tensor grad_weight, Tensor(a!) grad_logits) -> ()");
  ops.cpu<top_k_router_backward>("top_k_router_backward");
}

// Experts and linear layers. Python checks shapes, dtypes and strides; what would read beyond a tensor is checked here.
#include "torch_binding.h"

namespace {

using moemb::check;
using moemb::fail;
using moemb::OptionalTensor;
using moemb::Tensor;

void demand(bool holds, const char* op, const char* what) {
  if (!holds) fail(op, what);
}

// Rows of a matrix: any distance apart, each contiguous.
int64_t row_stride(const Tensor& matrix, const char* op) {
  demand(matrix.dim() == 2, op, "rows must be a matrix");
  demand(matrix.size(1) <= 1 || matrix.stride(1) == 1, op, "rows must be contiguous");
  return matrix.stride(0);
}

void* wanted(const OptionalTensor& tensor) { return tensor.has_value() ? tensor->out() : nullptr; }

struct Sizes {
  int64_t tokens, slots, experts, hidden, intermediate;
};

Sizes sizes_of(const char* op, const Tensor& rows, const Tensor& index, const Tensor& weight, const Tensor& gate_up,
               const Tensor& down) {
  demand(index.dim() == 2 && gate_up.dim() == 3 && down.dim() == 3, op, "wrong number of axes");
  const Sizes sizes = {index.size(0), index.size(1), down.size(0), down.size(1), down.size(2)};
  demand(rows.size(0) == sizes.tokens && rows.size(1) == sizes.hidden, op, "states and the other sizes differ");
  demand(weight.numel() == sizes.tokens * sizes.slots && weight.dtype() == MOEMB_FP32, op, "weight must be fp32");
  demand(index.dtype() == MOEMB_INT64, op, "expert_index must be int64");
  demand(gate_up.size(0) == sizes.experts && gate_up.size(1) == 2 * sizes.intermediate &&
             gate_up.size(2) == sizes.hidden,
         op, "gate_up_proj and down_proj differ");
  demand(gate_up.dtype() == rows.dtype() && down.dtype() == rows.dtype(), op, "dtypes differ");
  return sizes;
}

void check_experts(int status, const char* op) {
  if (status == MOEMB_BAD_ARGUMENT) fail(op, "an entry of expert_index is outside 0 .. num_experts");
  check(status, op);
}

void experts(const Tensor& states, const Tensor& index, const Tensor& weight, const Tensor& gate_up,
             const Tensor& down, const Tensor& output, const OptionalTensor& saved) {
  const int64_t stride = row_stride(states, "experts");
  const Sizes n = sizes_of("experts", states, index, weight, gate_up, down);
  const int status = moemb_experts_forward(states.dtype(), states.data(), stride, index.data<int64_t>(),
                                           weight.data<float>(), gate_up.data(), down.data(), output.out(),
                                           wanted(saved), n.tokens, n.slots, n.experts, n.hidden, n.intermediate);
  check_experts(status, "experts");
}

void experts_backward(const Tensor& grad, const Tensor& index, const Tensor& weight, const Tensor& saved,
                      const Tensor& gate_up, const Tensor& down, const Tensor& grad_states, const Tensor& grad_weight,
                      const OptionalTensor& grad_saved, const OptionalTensor& activation) {
  const int64_t stride = row_stride(grad, "experts_backward");
  const Sizes n = sizes_of("experts_backward", grad, index, weight, gate_up, down);
  const int status = moemb_experts_backward(
      grad.dtype(), grad.data(), stride, index.data<int64_t>(), weight.data<float>(), saved.data(), gate_up.data(),
      down.data(), grad_states.out(), grad_weight.out<float>(), wanted(grad_saved), wanted(activation), n.tokens,
      n.slots, n.experts, n.hidden, n.intermediate);
  check_experts(status, "experts_backward");
}

void linear(const Tensor& source, const Tensor& weight, const OptionalTensor& bias, const Tensor& output) {
  const int64_t stride = row_stride(source, "linear");
  demand(weight.dim() == 2 && weight.size(1) == source.size(1), "linear", "input and weight differ");
  demand(weight.dtype() == source.dtype(), "linear", "dtypes differ");
  const bool fits = !bias.has_value() || (bias->dtype() == source.dtype() && bias->numel() == weight.size(0));
  demand(fits, "linear", "weight and bias differ");
  check(moemb_linear_forward(source.dtype(), source.data(), stride, weight.data(),
                             bias.has_value() ? bias->data() : nullptr, output.out(), source.size(0), weight.size(0),
                             weight.size(1)),
        "linear");
}

void linear_backward(const Tensor& grad, const Tensor& weight, const Tensor& grad_input) {
  const int64_t stride = row_stride(grad, "linear_backward");
  demand(weight.dim() == 2 && weight.size(0) == grad.size(1), "linear_backward", "grad and weight differ");
  demand(weight.dtype() == grad.dtype(), "linear_backward", "dtypes differ");
  check(moemb_linear_backward(grad.dtype(), grad.data(), stride, weight.data(), grad_input.out(), grad.size(0),
                              weight.size(0), weight.size(1)),
        "linear_backward");
}

}  // namespace

MOEMB_LIBRARY(gemm) {
  ops.def(
      "experts(Tensor states, Tensor index, Tensor weight, Tensor gate_up, Tensor down, Tensor(a!) output, "
      "Tensor(b!)? saved) -> ()");
  ops.cpu<experts>("experts");
  ops.def(
      "experts_backward(Tensor grad, Tensor index, Tensor weight, Tensor saved, Tensor gate_up, Tensor down, "
      "Tensor(a!) grad_states, Tensor(b!) grad_weight, Tensor(c!)? grad_saved, Tensor(d!)? activation) -> ()");
  ops.cpu<experts_backward>("experts_backward");
  ops.def("linear(Tensor input, Tensor weight, Tensor? bias, Tensor(a!) output) -> ()");
  ops.cpu<linear>("linear");
  ops.def("linear_backward(Tensor grad, Tensor weight, Tensor(a!) grad_input) -> ()");
  ops.cpu<linear_backward>("linear_backward");
}

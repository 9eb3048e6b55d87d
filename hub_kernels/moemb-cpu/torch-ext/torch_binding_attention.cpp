// Varlen attention.
#include "torch_binding.h"

namespace {

using moemb::check;
using moemb::Tensor;

MoembAttention inputs_of(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
                         double scaling, bool causal) {
  MoembAttention inputs = {};
  inputs.query = query.data();
  inputs.key = key.data();
  inputs.value = value.data();
  for (int axis = 0; axis < 2; ++axis) {
    inputs.query_stride[axis] = query.stride(axis);
    inputs.key_stride[axis] = key.stride(axis);
    inputs.value_stride[axis] = value.stride(axis);
  }
  inputs.cu_seqlens = cu_seqlens.data<int32_t>();
  inputs.segments = cu_seqlens.size(0) - 1;
  inputs.tokens = query.size(0);
  inputs.heads = query.size(1);
  inputs.key_heads = key.size(1);
  inputs.dim = query.size(2);
  inputs.scaling = static_cast<float>(scaling);
  inputs.causal = causal;
  inputs.dtype = query.dtype();
  return inputs;
}

void varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
                      const Tensor& cu_seqlens_k, double scaling, bool causal, const Tensor& output,
                      const Tensor& log_sum) {
  MoembAttention inputs = inputs_of(query, key, value, cu_seqlens, scaling, causal);
  if (cu_seqlens_k.numel() != 0) {  // empty: each query's segment is that of its keys
    inputs.cu_keys = cu_seqlens_k.data<int32_t>();
    inputs.keys = key.size(0);
  }
  float* sums = log_sum.numel() == 0 ? nullptr : log_sum.out<float>();  // empty: no backward will ask
  check(moemb_cpu_attention(&inputs, output.out(), sums), "varlen_attention");
}

void varlen_attention_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
                               double scaling, bool causal, const Tensor& output, const Tensor& log_sum,
                               const Tensor& grad, const Tensor& grad_query, const Tensor& grad_key,
                               const Tensor& grad_value) {
  const MoembAttention inputs = inputs_of(query, key, value, cu_seqlens, scaling, causal);
  const int status = moemb_cpu_attention_backward(&inputs, output.data(), log_sum.data<float>(), grad.data(),
                                                  grad_query.out(), grad_key.out(), grad_value.out());
  check(status, "varlen_attention_backward");
}

}  // namespace

MOEMB_LIBRARY(attention) {
  ops.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor cu_seqlens_k, "
      "float scaling, bool causal, Tensor(a!) out, Tensor(b!) log_sum) -> ()");
  ops.cpu<varlen_attention>("varlen_attention");
  ops.def(
      "varlen_attention_backward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scaling, "
      "bool causal, Tensor output, Tensor log_sum, Tensor grad, Tensor(a!) grad_query, Tensor(b!) grad_key, "
      "Tensor(c!) grad_value) -> ()");
  ops.cpu<varlen_attention_backward>("varlen_attention_backward");
}

// The gated delta rule and the causal convolution.
#include "torch_binding.h"

namespace {

using moemb::check;
using moemb::OptionalTensor;
using moemb::Tensor;

MoembGatedDelta inputs_of(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                          const Tensor& beta, const Tensor& cu_seqlens) {
  MoembGatedDelta inputs = {};
  inputs.dtype = value.dtype();
  inputs.tokens = value.size(0);
  inputs.segments = cu_seqlens.numel() - 1;
  inputs.key_heads = key.size(1);
  inputs.value_heads = value.size(1);
  inputs.key_dim = key.size(2);
  inputs.value_dim = value.size(2);
  inputs.cu_seqlens = cu_seqlens.data<int32_t>();
  inputs.query = query.data();
  inputs.key = key.data();
  inputs.value = value.data();
  inputs.query_token = query.stride(0);
  inputs.key_token = key.stride(0);
  inputs.value_token = value.stride(0);
  inputs.query_head = query.stride(1);
  inputs.key_head = key.stride(1);
  inputs.value_head = value.stride(1);
  inputs.decay = decay.data<float>();
  inputs.beta = beta.data<float>();
  return inputs;
}

void gated_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                      const Tensor& beta, const Tensor& cu_seqlens, const Tensor& output) {
  const MoembGatedDelta inputs = inputs_of(query, key, value, decay, beta, cu_seqlens);
  check(moemb_cpu_gated_delta(&inputs, nullptr, output.out()), "gated_delta_rule");
}

void gated_delta_rule_continued(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                                const Tensor& beta, const Tensor& cu_seqlens, const Tensor& initial,
                                const Tensor& state_of, const OptionalTensor& rows, const OptionalTensor& silent,
                                const Tensor& output, const OptionalTensor& final) {
  MoembGatedDelta inputs = inputs_of(query, key, value, decay, beta, cu_seqlens);
  MoembContinuation how = {};
  how.initial = initial.data<float>();
  how.count = initial.size(0);
  how.state_of = state_of.data<int32_t>();
  if (final.has_value()) how.final = final->out<float>();
  if (rows.has_value()) {
    how.rows = rows->data<int64_t>();
    how.rows_in_all = inputs.tokens;
    how.silent = silent->data<int32_t>();
    inputs.tokens = rows->numel();
  }
  check(moemb_cpu_gated_delta(&inputs, &how, output.out()), "gated_delta_rule");
}

void gated_delta_rule_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                               const Tensor& beta, const Tensor& cu_seqlens, const Tensor& grad,
                               const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value,
                               const Tensor& grad_decay, const Tensor& grad_beta) {
  const MoembGatedDelta inputs = inputs_of(query, key, value, decay, beta, cu_seqlens);
  const int status =
      moemb_cpu_gated_delta_backward(&inputs, grad.data(), grad_query.out(), grad_key.out(), grad_value.out(),
                                     grad_decay.out<float>(), grad_beta.out<float>());
  check(status, "gated_delta_rule_backward");
}

MoembCausalConv inputs_of(const Tensor& hidden_states, const Tensor& weight, const Tensor& cu_seqlens, bool silu) {
  MoembCausalConv inputs = {};
  inputs.dtype = hidden_states.dtype();
  inputs.weight_dtype = weight.dtype();
  inputs.tokens = hidden_states.size(0);
  inputs.segments = cu_seqlens.numel() - 1;
  inputs.channels = hidden_states.size(1);
  inputs.taps = weight.size(1);
  inputs.cu_seqlens = cu_seqlens.data<int32_t>();
  inputs.hidden_states = hidden_states.data();
  inputs.token = hidden_states.stride(0);
  inputs.weight = weight.data();
  inputs.silu = silu;
  return inputs;
}

void causal_conv(const Tensor& hidden_states, const Tensor& weight, const Tensor& cu_seqlens, bool silu,
                 const Tensor& output) {
  const MoembCausalConv inputs = inputs_of(hidden_states, weight, cu_seqlens, silu);
  check(moemb_cpu_causal_conv(&inputs, output.out()), "causal_conv");
}

void causal_conv_backward(const Tensor& hidden_states, const Tensor& weight, const Tensor& cu_seqlens, bool silu,
                          const Tensor& grad, const Tensor& grad_hidden, const Tensor& grad_weight) {
  const MoembCausalConv inputs = inputs_of(hidden_states, weight, cu_seqlens, silu);
  const int status =
      moemb_cpu_causal_conv_backward(&inputs, grad.data(), grad_hidden.out(), grad_weight.out<float>());
  check(status, "causal_conv_backward");
}

}  // namespace

MOEMB_LIBRARY(gated_delta) {
  ops.def(
      "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor cu_seqlens, "
      "Tensor(a!) out) -> ()");
  ops.cpu<gated_delta_rule>("gated_delta_rule");
  ops.def(
      "gated_delta_rule_continued(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, "
      "Tensor cu_seqlens, Tensor initial_state, Tensor state_of, Tensor? rows, Tensor? silent, Tensor(a!) out, "
      "Tensor(b!)? final_state) -> ()");
  ops.cpu<gated_delta_rule_continued>("gated_delta_rule_continued");
  ops.def(
      "gated_delta_rule_backward(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, "
      "Tensor cu_seqlens, Tensor grad, Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, "
      "Tensor(d!) grad_decay, Tensor(e!) grad_beta) -> ()");
  ops.cpu<gated_delta_rule_backward>("gated_delta_rule_backward");
  ops.def(
      "causal_conv(Tensor hidden_states, Tensor weight, Tensor cu_seqlens, bool silu, Tensor(a!) out) -> ()");
  ops.cpu<causal_conv>("causal_conv");
  ops.def(
      "causal_conv_backward(Tensor hidden_states, Tensor weight, Tensor cu_seqlens, bool silu, Tensor grad, "
      "Tensor(a!) grad_hidden, Tensor(b!) grad_weight) -> ()");
  ops.cpu<causal_conv_backward>("causal_conv_backward");
}

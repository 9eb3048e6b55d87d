// Entries of the grouped products: choose the instruction set, cut long inputs into ranges of tokens.
#include "gemm.h"

using moemb::Experts;
using moemb::Linear;

namespace {

int64_t element_bytes(int dtype) { return dtype == MOEMB_FP32 ? 4 : 2; }

template <class T>
T* advance(T* pointer, int64_t elements, int dtype) {
  if (pointer == nullptr) return nullptr;
  return (T*)((const char*)pointer + elements * element_bytes(dtype));
}

Experts part_of(const Experts& whole, int64_t first, int64_t tokens) {
  Experts part = whole;
  const int dtype = whole.dtype;
  const int64_t pairs = first * whole.slots;
  part.tokens = tokens;
  part.index += pairs;
  part.weight += pairs;
  part.states = advance(part.states, first * whole.states_stride, dtype);
  part.output = advance(part.output, first * whole.hidden, dtype);
  part.saved = advance(part.saved, pairs * 2 * whole.intermediate, dtype);
  part.grad = advance(part.grad, first * whole.grad_stride, dtype);
  part.grad_states = advance(part.grad_states, first * whole.hidden, dtype);
  if (part.grad_weight != nullptr) part.grad_weight += pairs;
  part.grad_saved = advance(part.grad_saved, pairs * 2 * whole.intermediate, dtype);
  part.activation = advance(part.activation, pairs * whole.intermediate, dtype);
  return part;
}

bool known(int dtype) { return dtype == MOEMB_FP32 || dtype == MOEMB_BF16 || dtype == MOEMB_FP16; }

bool on_amx(int dtype) { return dtype == MOEMB_BF16 && moemb_cpu_isa() >= MOEMB_ISA_AMX; }

int in_ranges(const Experts& problem, int (*run)(const Experts&)) {
  const int64_t at_once = tokens_at_once(problem);
  for (int64_t first = 0; first < problem.tokens; first += at_once) {
    const int64_t left = problem.tokens - first;
    const int status = run(part_of(problem, first, left < at_once ? left : at_once));
    if (status != MOEMB_OK) return status;
  }
  return MOEMB_OK;
}

}  // namespace

extern "C" int moemb_experts_forward(int dtype, const void* states, int64_t states_stride, const int64_t* index,
                                     const float* weight, const void* gate_up_proj, const void* down_proj, void* output,
                                     void* saved, int64_t tokens, int64_t slots, int64_t experts, int64_t hidden,
                                     int64_t intermediate) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512 || !known(dtype)) return MOEMB_UNSUPPORTED;
  Experts problem = {};
  problem.dtype = dtype;
  problem.tokens = tokens, problem.slots = slots, problem.experts = experts;
  problem.hidden = hidden, problem.intermediate = intermediate;
  problem.index = index, problem.weight = weight;
  problem.gate_up_proj = gate_up_proj, problem.down_proj = down_proj;
  problem.states = states, problem.states_stride = states_stride;
  problem.output = output, problem.saved = saved;
  return in_ranges(problem, on_amx(dtype) ? moemb::experts_forward_amx : moemb::experts_forward_avx512);
}

extern "C" int moemb_experts_backward(int dtype, const void* grad, int64_t grad_stride, const int64_t* index,
                                      const float* weight, const void* saved, const void* gate_up_proj,
                                      const void* down_proj, void* grad_states, float* grad_weight, void* grad_saved,
                                      void* activation, int64_t tokens, int64_t slots, int64_t experts, int64_t hidden,
                                      int64_t intermediate) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512 || !known(dtype)) return MOEMB_UNSUPPORTED;
  Experts problem = {};
  problem.dtype = dtype;
  problem.tokens = tokens, problem.slots = slots, problem.experts = experts;
  problem.hidden = hidden, problem.intermediate = intermediate;
  problem.index = index, problem.weight = weight;
  problem.gate_up_proj = gate_up_proj, problem.down_proj = down_proj;
  problem.saved = const_cast<void*>(saved);
  problem.grad = grad, problem.grad_stride = grad_stride;
  problem.grad_states = grad_states, problem.grad_weight = grad_weight;
  problem.grad_saved = grad_saved, problem.activation = activation;
  return in_ranges(problem, on_amx(dtype) ? moemb::experts_backward_amx : moemb::experts_backward_avx512);
}

extern "C" int moemb_linear_forward(int dtype, const void* source, int64_t source_stride, const void* weight,
                                    const void* bias, void* target, int64_t rows, int64_t outputs, int64_t inputs) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512 || !known(dtype)) return MOEMB_UNSUPPORTED;
  const Linear problem = {dtype, rows, outputs, inputs, weight, bias, source, source_stride, target};
  return on_amx(dtype) ? moemb::linear_forward_amx(problem) : moemb::linear_forward_avx512(problem);
}

extern "C" int moemb_linear_backward(int dtype, const void* source, int64_t source_stride, const void* weight,
                                     void* target, int64_t rows, int64_t outputs, int64_t inputs) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512 || !known(dtype)) return MOEMB_UNSUPPORTED;
  const Linear problem = {dtype, rows, outputs, inputs, weight, nullptr, source, source_stride, target};
  return on_amx(dtype) ? moemb::linear_backward_amx(problem) : moemb::linear_backward_avx512(problem);
}

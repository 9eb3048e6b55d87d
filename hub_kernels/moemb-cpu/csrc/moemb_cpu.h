// C interface of the kernels: raw pointers, strides in elements, sizes. No torch types, no exceptions, no iostream, so
// that the library needs nothing newer than GLIBC 2.28 and GLIBCXX 3.4.24.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Element types of the data pointers.
enum MoembDtype {
  MOEMB_FP32 = 0,
  MOEMB_BF16 = 1,
  MOEMB_FP16 = 2,
  MOEMB_INT32 = 3,
  MOEMB_INT64 = 4,
  MOEMB_OTHER = 255,
};

// Return values of the kernels; the binding turns anything but MOEMB_OK into a RuntimeError.
enum MoembStatus {
  MOEMB_OK = 0,
  MOEMB_NO_MEMORY = 1,       // a workspace could not be allocated
  MOEMB_UNSUPPORTED = 2,     // this CPU, dtype or size; Python asks `supports` first
  MOEMB_BAD_ARGUMENT = 3,    // sizes that contradict each other
};

enum MoembIsa {
  MOEMB_ISA_NONE = 0,
  MOEMB_ISA_AVX512 = 1,  // F, BW, VL, DQ and FMA
  MOEMB_ISA_AMX = 2,     // and AVX512-BF16, AMX-TILE, AMX-BF16 with the kernel's permission
};

// ---- cpu.cpp ------------------------------------------------------------------------------------------------------

// Best instruction set that this CPU and the limit allow. The first call reads the CPU, asks the kernel for the AMX
// state and reads MOEMB_CPU_ISA (`amx`, `avx512` or `none`); later calls cost one load.
int moemb_cpu_isa(void);

// Lower (never raise) what moemb_cpu_isa returns; MOEMB_ISA_AMX lifts the limit again. For tests.
void moemb_cpu_limit_isa(int limit);

// ---- gemm_*.cpp, experts_*.cpp -------------------------------------------------------------------------------------

// dtype (MOEMB_FP32, BF16 or FP16) is that of every `void*`; these matrices are dense, but for row strides named. Rows
// of `saved`, `grad_saved` and `activation` are (token, slot) pairs; those of skipped pairs are not touched.
// gate_up_proj [experts, 2 * intermediate, hidden], down_proj [experts, hidden, intermediate], index and weight
// [tokens, slots], index == experts: slot skipped; any other index outside 0 .. experts - 1: MOEMB_BAD_ARGUMENT.

// output [tokens, hidden]; saved [tokens * slots, 2 * intermediate] gets gate and up for the backward pass, or is null.
int moemb_experts_forward(int dtype, const void* states, int64_t states_stride, const int64_t* index,
                          const float* weight, const void* gate_up_proj, const void* down_proj, void* output,
                          void* saved, int64_t tokens, int64_t slots, int64_t experts, int64_t hidden,
                          int64_t intermediate);

// grad_states [tokens, hidden], grad_weight [tokens, slots] (0 for skipped slots). For the gradients of the weights,
// unless null: grad_saved [tokens * slots, 2 * intermediate], the gradient of gate and up, and
// activation [tokens * slots, intermediate], weight * silu(gate) * up.
int moemb_experts_backward(int dtype, const void* grad, int64_t grad_stride, const int64_t* index, const float* weight,
                           const void* saved, const void* gate_up_proj, const void* down_proj, void* grad_states,
                           float* grad_weight, void* grad_saved, void* activation, int64_t tokens, int64_t slots,
                           int64_t experts, int64_t hidden, int64_t intermediate);

// target [rows, outputs] = source [rows, inputs] * weight [outputs, inputs]^T + bias [outputs] (may be null).
int moemb_linear_forward(int dtype, const void* source, int64_t source_stride, const void* weight, const void* bias,
                         void* target, int64_t rows, int64_t outputs, int64_t inputs);

// target [rows, inputs] = source [rows, outputs] * weight [outputs, inputs].
int moemb_linear_backward(int dtype, const void* source, int64_t source_stride, const void* weight, void* target,
                          int64_t rows, int64_t outputs, int64_t inputs);

// ---- gated_delta_*.cpp, causal_conv.cpp ----------------------------------------------------------------------------

// Inputs of the gated delta rule over packed segments. All strides count elements; features are contiguous. Any sizes
// of the features up to 1024; `value_heads` is a multiple of `key_heads` and consecutive value heads share a key head.
typedef struct {
    int32_t dtype;  // of query, key, value, the output and their gradients: fp32, bf16 or fp16
    int64_t tokens, segments;
    int64_t key_heads, value_heads, key_dim, value_dim;
    const int32_t* cu_seqlens;                // segments + 1 rising offsets, from 0 to `tokens`
    const void *query, *key, *value;          // (tokens, heads, dim)
    int64_t query_token, key_token, value_token;  // distance of tokens
    int64_t query_head, key_head, value_head;     // distance of heads
    const float *decay, *beta;                // (tokens, value_heads), contiguous; log decay <= 0
} MoembGatedDelta;

// How segments of the forward pass continue others. States are (value_heads, key_dim, value_dim) each, contiguous.
typedef struct {
    const float* initial;  // `count` states
    int64_t count;
    const int32_t* state_of;  // of each segment: the state it starts from, -1 for 0; null: all start from 0
    float* final;             // one for each segment; null: not wanted
    // Null, or the row of each token in all inputs and in the output, one of `rows_in_all`. Segments may have rows in
    // common: nothing is written of the first `silent` tokens of each, so that one thread alone writes a row.
    const int64_t* rows;
    int64_t rows_in_all;
    const int32_t* silent;
} MoembContinuation;

// Queries and keys are L2-normalised (x / sqrt(sum x^2 + 1e-6)), queries scaled by key_dim^-0.5, the state starts at 0
// in every segment, all arithmetic is fp32. A segment's bits depend on that segment alone. `output` and all gradients
// are contiguous (tokens, heads, dim) of `dtype`, those of decay and beta fp32. `how` may be null. A segment that
// starts from the state behind the first 64 n tokens of another gives the bits of the two in one.
int moemb_cpu_gated_delta(const MoembGatedDelta* inputs, const MoembContinuation* how, void* output);
int moemb_cpu_gated_delta_backward(const MoembGatedDelta* inputs, const void* grad_output, void* grad_query,
                                   void* grad_key, void* grad_value, float* grad_decay, float* grad_beta);

// Depthwise causal convolution over packed segments; a tap never reaches across the start of a segment.
typedef struct {
    int32_t dtype, weight_dtype;  // fp32, bf16 or fp16 each
    int64_t tokens, segments, channels, taps;  // 1 to 8 taps
    const int32_t* cu_seqlens;
    const void* hidden_states;  // (tokens, channels)
    int64_t token;              // distance of tokens in elements; channels are contiguous
    const void* weight;         // (channels, taps), contiguous, oldest tap first
    int32_t silu;               // whether x * sigmoid(x) follows
} MoembCausalConv;

// fp32 sums; `output` (tokens, channels), contiguous, of `dtype`.
int moemb_cpu_causal_conv(const MoembCausalConv* inputs, void* output);

// grad_hidden (tokens, channels) of `dtype`; grad_weight (channels, taps) fp32, summed over blocks of 256 tokens in
// order, or null.
int moemb_cpu_causal_conv_backward(const MoembCausalConv* inputs, const void* grad_output, void* grad_hidden,
                                   float* grad_weight);

// ---- norms.cpp, rows.cpp, router.cpp, attention_*.cpp --------------------------------------------------------------

// A read-only view of rows with contiguous features: row i starts at (i / inner) * outer_stride + (i % inner) *
// inner_stride, counted in elements.
typedef struct {
  const void* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  int32_t dtype;
} MoembRows;

// Outputs of all functions are contiguous. Every gradient of a weight is a sum over blocks of rows that depend on the
// number of rows alone, added in order: the same bits for any number of threads.

// y = x / sqrt(mean x^2 + eps) * (weight + offset); `weight` has `dim` features of `weight_dtype`.
int moemb_cpu_rms_norm(MoembRows states, const void* weight, int32_t weight_dtype, float offset, int64_t rows,
                       int64_t dim, float eps, void* output, int32_t output_dtype);

// grad_states in the dtype of `states`; grad_weight is fp32 and may be null.
int moemb_cpu_rms_norm_backward(MoembRows states, const void* weight, int32_t weight_dtype, float offset,
                                MoembRows grad_output, int64_t rows, int64_t dim, float eps, void* grad_states,
                                float* grad_weight);

// y = x / sqrt(mean x^2 + eps) * weight * silu(gate), in the dtype of `gate`.
int moemb_cpu_gated_rms_norm(MoembRows states, MoembRows gate, const void* weight, int32_t weight_dtype, int64_t rows,
                             int64_t dim, float eps, void* output);

// grad_states, grad_gate in the dtypes of `states`, `gate`; grad_weight is fp32 and may be null.
int moemb_cpu_gated_rms_norm_backward(MoembRows states, MoembRows gate, const void* weight, int32_t weight_dtype,
                                      MoembRows grad_output, int64_t rows, int64_t dim, float eps, void* grad_states,
                                      void* grad_gate, float* grad_weight);

// y = silu(gate) * up; both of one dtype, which the output has too.
int moemb_cpu_swiglu(MoembRows gate, MoembRows up, int64_t rows, int64_t dim, void* output);

int moemb_cpu_swiglu_backward(MoembRows gate, MoembRows up, MoembRows grad_output, int64_t rows, int64_t dim,
                              void* grad_gate, void* grad_up);

// Rotary embedding of the leading `rotary` features of (tokens, heads, dim) rows; `cos`, `sin` are (tokens, rotary)
// fp32 with the given row stride. `backward` applies the transposed rotation.
int moemb_cpu_rotary(MoembRows states, const float* cos, const float* sin, int64_t table_stride, int64_t tokens,
                     int64_t heads, int64_t dim, int64_t rotary, int32_t backward, void* output,
                     int32_t output_dtype);

// The `k` largest of each row of fp32 logits in descending order (ties: lower index first; NaN counts as largest) and
// softmax over the chosen ones.
int moemb_cpu_top_k_router(const float* logits, int64_t row_stride, int64_t tokens, int64_t num_experts, int64_t k,
                           int64_t* expert_index, float* weight);

// grad_logits (tokens, num_experts) is written in full.
int moemb_cpu_top_k_router_backward(const int64_t* expert_index, const float* weight, const float* grad_weight,
                                    int64_t tokens, int64_t num_experts, int64_t k, float* grad_logits);

// Attention inside the segments of a packing. Strides count elements; the features of a head are contiguous.
// `output`, `log_sum` and all gradients are contiguous. Arithmetic is fp32, but for bf16 on AMX, where products have
// bf16 operands and fp32 sums.
typedef struct {
  const void* query;
  const void* key;
  const void* value;
  int64_t query_stride[2];  // of a token, of a head
  int64_t key_stride[2];
  int64_t value_stride[2];
  const int32_t* cu_seqlens;  // (segments + 1)
  int64_t segments;
  int64_t tokens;
  int64_t heads;
  int64_t key_heads;  // divides `heads`
  int64_t dim;
  float scaling;
  int32_t causal;
  int32_t dtype;
  // Null, or (segments + 1) for keys and values that are more than the queries, which are then the last tokens of
  // their segment; forward only.
  const int32_t* cu_keys;
  int64_t keys;
} MoembAttention;

// output (tokens, heads, dim) in the dtype of the inputs; log_sum (tokens, heads) fp32, the base-2 logarithm of each
// query's sum of exponentials, may be null.
int moemb_cpu_attention(const MoembAttention* inputs, void* output, float* log_sum);

// The same for bf16 on AMX and a positive scaling; moemb_cpu_attention chooses it.
int moemb_cpu_attention_amx(const MoembAttention* inputs, void* output, float* log_sum);

// From the results of the forward; gradients in the dtype of the inputs.
int moemb_cpu_attention_backward(const MoembAttention* inputs, const void* output, const float* log_sum,
                                 const void* grad_output, void* grad_query, void* grad_key, void* grad_value);

#ifdef __cplusplus
}
#endif

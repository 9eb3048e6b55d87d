// What the grouped products share: the problem's description, the plan of row blocks, workspaces and thread counts.
//
// Everything here is compiled for every x86-64 CPU; the arithmetic lives in gemm_amx.h and gemm_avx512.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "moemb_cpu.h"

namespace moemb {

// Rows of one expert that are multiplied together: `rows` entries of Plan::order from `first` on.
struct Block {
  int32_t expert;
  int32_t first;
  int32_t rows;
};

// The (token, slot) pairs of a range of tokens, by expert; inside an expert they keep their order.
struct Plan {
  const int32_t* order;  // flat token * slots + slot, one per pair
  const Block* blocks;
  int32_t pairs;
  int32_t block_count;
};

// The experts of a range of tokens. Strides and sizes in elements. Rows of the saved tensors are (token, slot) pairs.
struct Experts {
  int dtype;              // of everything that is `void*`
  int64_t tokens, slots, experts, hidden, intermediate;
  const int64_t* index;   // [tokens, slots]; `experts` marks a skipped slot
  const float* weight;    // [tokens, slots]
  const void* gate_up_proj;  // [experts, 2 * intermediate, hidden]
  const void* down_proj;     // [experts, hidden, intermediate]
  // forward
  const void* states;     // [tokens, hidden]
  int64_t states_stride;
  void* output;           // [tokens, hidden]
  void* saved;            // [tokens * slots, 2 * intermediate], gate and up before the activation, or null
  // backward; reads `saved`
  const void* grad;       // [tokens, hidden], gradient of the output
  int64_t grad_stride;
  void* grad_states;      // [tokens, hidden]
  float* grad_weight;     // [tokens, slots]
  void* grad_saved;       // [tokens * slots, 2 * intermediate], gradient of gate and up, or null
  void* activation;       // [tokens * slots, intermediate], weight * silu(gate) * up, or null
};

// y = x w^T + bias, or its gradient of x. Strides and sizes in elements.
struct Linear {
  int dtype;
  int64_t rows, outputs, inputs;
  const void* weight;  // [outputs, inputs]
  const void* bias;    // [outputs] or null
  const void* source;  // [rows, inputs]; backward: [rows, outputs]
  int64_t source_stride;
  void* target;        // [rows, outputs]; backward: [rows, inputs]
};

// Tokens whose rows are added by one thread at a time.
constexpr int kCombined = 16;

// ---- gemm_plan.cpp ------------------------------------------------------------------------------------------------

// Blocks of at most `most` rows, whose sizes are multiples of `step` but for an expert's last. MOEMB_BAD_ARGUMENT when
// an index is outside 0 .. experts. The plan lives until the next one of this thread.
int make_plan(const Experts& problem, int most, int step, Plan* plan);

// Workspaces of the calling thread, 4096-byte aligned, contents undefined; they grow and stay. Null when out of memory.
enum Workspace { kPlanSpace, kSharedSpace, kOutputSpace, kPanelSpace, kWorkspaces };
void* workspace(Workspace which, size_t bytes);

// Tokens that are worked on together, so that the outputs of their pairs stay close to the caches. Depends on sizes
// only; no result depends on it.
int64_t tokens_at_once(const Experts& problem);

// Threads worth starting for this much work: a parallel region costs more than 20 microseconds of it.
int threads_for(double operations, double bytes, int dtype);

// Units of work per row block when there are too few blocks to keep `threads` busy; 1 when there are enough.
int64_t pieces_for(int64_t blocks, int threads, int64_t most);

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- per instruction set ------------------------------------------------------------------------------------------

int experts_forward_amx(const Experts& problem);
int experts_backward_amx(const Experts& problem);
int linear_forward_amx(const Linear& problem);
int linear_backward_amx(const Linear& problem);
int experts_forward_avx512(const Experts& problem);
int experts_backward_avx512(const Experts& problem);
int linear_forward_avx512(const Linear& problem);
int linear_backward_avx512(const Linear& problem);

}  // namespace moemb

// Gradients of experts in bf16 on AMX: of the states, of the routing weights and, for the gradients of the expert
// weights, of gate and up.
//
// Per block of rows of one expert: the gradient of the activation is grad * down_proj; from it and the gate and up
// values that the forward pass kept come the gradients of gate and up; these times gate_up_proj is the gradient of the
// states, one row per (token, slot). A last pass adds a token's rows in the order of its slots.
#include <omp.h>

#include "experts.h"
#include "gemm_amx_products.h"

namespace moemb {
namespace {

constexpr int kMostRows = kMostTokenTiles * kTileRows;

// Rows are one k block further apart than they are long: no power of two, see copy_weight_rows.
int64_t row_stride(int64_t width) { return round_up(width, kStep) + kStep; }

void backward_block(const Experts& p, const Plan& plan, const Block& block, Bf16* outputs, Bf16* grads, Bf16* row_grads,
                    char* space) {
  const int64_t hidden = p.hidden, inner = p.intermediate, total = round_up(block.rows, 32);
  const int64_t grads_stride = row_stride(hidden), inner_stride = row_stride(2 * inner);
  const int32_t* pairs = plan.order + block.first;
  for (int64_t row = 0; row < total; ++row) {
    const bool exists = row < block.rows;
    const Bf16* source = static_cast<const Bf16*>(p.grad) + (exists ? pairs[row] / p.slots * p.grad_stride : 0);
    copy_rows(source, 0, exists, 1, hidden, round_up(hidden, kStep), grads_stride, grads + row * grads_stride);
    // what lies behind the last column, or the last row, takes part in the second product
    Bf16* target = row_grads + row * inner_stride;
    const int64_t from = exists ? 2 * inner / kStep * kStep : 0;
    for (int64_t k = from; k < inner_stride; k += kStep) _mm512_storeu_si512(target + k, _mm512_setzero_si512());
  }
  alignas(64) Vec sums[kMostRows];
  for (int64_t row = 0; row < block.rows; ++row) sums[row] = zeros();
  const auto activate = [&](int64_t row, int64_t column, Vec low, Vec high) {
    if (row >= block.rows) return;
    Bf16* target = row_grads + row * inner_stride;
    sums[row] = add(sums[row], backward_columns<Bf16>(p, pairs[row], column, low, target));
    if (column + kLanes >= inner) return;
    sums[row] = add(sums[row], backward_columns<Bf16>(p, pairs[row], column + kLanes, high, target));
  };
  const Bf16* down = static_cast<const Bf16*>(p.down_proj) + block.expert * hidden * inner;
  multiply_columns(down, hidden, inner, grads, grads_stride, total, 0, (inner + 31) / 32, space, activate);
  for (int64_t row = 0; row < block.rows; ++row) p.grad_weight[pairs[row]] = sum(sums[row]);
  stores_before_tiles();
  const auto write = [&](int64_t row, int64_t column, Vec low, Vec high) {
    if (row >= block.rows) return;
    Bf16* target = outputs + pairs[row] * hidden + column;
    _mm512_mask_storeu_epi16(target, tail32(hidden - column), narrow_pair(low, high));
  };
  const Bf16* gate_up = static_cast<const Bf16*>(p.gate_up_proj) + block.expert * 2 * inner * hidden;
  multiply_columns(gate_up, 2 * inner, hidden, row_grads, inner_stride, total, 0, (hidden + 31) / 32, space, write);
}

}  // namespace

int experts_backward_amx(const Experts& p) {
  Plan plan;
  const int64_t widest = p.hidden > 2 * p.intermediate ? p.hidden : 2 * p.intermediate;
  int64_t most = (512 << 10) / (row_stride(widest) * 2) / 32 * 32;
  most = most < 64 ? 64 : (most > kMostRows ? kMostRows : most);
  const int status = make_plan(p, static_cast<int>(most), 32, &plan);
  if (status != MOEMB_OK) return status;
  clear_skipped(p);
  const double size = 6.0 * p.hidden * p.intermediate;
  const int threads = threads_for(size * plan.pairs, size * plan.block_count, p.dtype);
  Bf16* outputs = static_cast<Bf16*>(workspace(kOutputSpace, size_t(p.tokens) * p.slots * p.hidden * 2));
  if (outputs == nullptr) return MOEMB_NO_MEMORY;

  const size_t grads_bytes = round_up(most * row_stride(p.hidden) * 2, 4096);
  const size_t inner_bytes = round_up(most * row_stride(2 * p.intermediate) * 2, 4096);
  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    char* memory = static_cast<char*>(workspace(kPanelSpace, grads_bytes + inner_bytes + kColumnSpace));
    if (memory == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
    // a thread without memory takes its turns and leaves them undone: see experts_amx.cpp
#pragma omp for schedule(dynamic, 1)
    for (int64_t b = 0; b < plan.block_count; ++b) {
      if (memory == nullptr) continue;
      Bf16* grads = reinterpret_cast<Bf16*>(memory);
      Bf16* row_grads = reinterpret_cast<Bf16*>(memory + grads_bytes);
      backward_block(p, plan, plan.blocks[b], outputs, grads, row_grads, memory + grads_bytes + inner_bytes);
    }
#pragma omp for schedule(dynamic, kCombined) nowait
    for (int64_t token = 0; token < p.tokens; ++token) {
      combine(p, outputs, static_cast<Bf16*>(p.grad_states), token);
    }
  }
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace moemb

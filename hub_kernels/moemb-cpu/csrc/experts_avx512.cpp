// Experts in fp32 arithmetic on AVX-512, for fp32, fp16, and bf16 where there is no AMX. Forward and backward.
//
// The steps are those of experts_amx.cpp; between the products everything stays fp32.
#include <omp.h>

#include "experts.h"
#include "gemm_avx512.h"

namespace moemb {
namespace {

// One range of tokens; T is the element type in memory.
template <class T>
struct Range {
  const Experts& problem;
  Plan plan;
  T* outputs;  // [tokens * slots, hidden]
};

struct Space {
  float* panel;    // a block's tokens, or their gradients
  float* act;      // its activations, or the gradients of gate and up
  float* scratch;  // weight rows, or columns
};

int64_t most_rows(const Experts& p) { return block_tokens(p.hidden > p.intermediate ? p.hidden : p.intermediate); }

// ---- forward ------------------------------------------------------------------------------------------------------

template <class T>
void pack(const Range<T>& range, const Block& block, float* panel) {
  const Experts& p = range.problem;
  const T* rows[kMostTokens] = {};
  for (int64_t row = 0; row < block.rows; ++row) {
    rows[row] = static_cast<const T*>(p.states) + range.plan.order[block.first + row] / p.slots * p.states_stride;
  }
  if (block.rows <= kFew) {
    for (int64_t row = 0; row < block.rows; ++row) widen_row(rows[row], p.hidden, panel + row * p.hidden);
    return;
  }
  const Panels panels = {panel, block.rows, p.hidden};
  for (int number = 0; number < panels.count(); ++number) {
    pack_tokens(rows + number * kColumns, panels.vectors(number), p.hidden, panels.at(number));
  }
}

// 16 rows of gate and of up sums for up to 48 tokens: keep them for the backward pass.
template <class T>
void save(const Experts& p, const int32_t* pairs, int64_t tokens, int64_t column, const float* gate, const float* up) {
  const Mask mask = tail(p.intermediate - column);
  for (int64_t token = 0; token < tokens; token += kLanes) {
    Vec gates[kLanes], ups[kLanes];
    for (int row = 0; row < kLanes; ++row) {
      gates[row] = load(gate + row * kColumns + token);
      ups[row] = load(up + row * kColumns + token);
    }
    transpose(gates);
    transpose(ups);
    for (int64_t i = 0; i < kLanes && token + i < tokens; ++i) {
      T* target = static_cast<T*>(p.saved) + pairs[token + i] * 2 * p.intermediate + column;
      store(target, gates[i], mask);
      store(target + p.intermediate, ups[i], mask);
    }
  }
}

// `up` for at most four tokens, whose states and activations are plain rows.
template <class T>
void up_few(const Range<T>& range, const Block& block, const Space& space, int64_t from, int64_t to) {
  const Experts& p = range.problem;
  const int64_t hidden = p.hidden, inner = p.intermediate;
  const T* weight = static_cast<const T*>(p.gate_up_proj) + block.expert * 2 * inner * hidden;
  const int32_t* pairs = range.plan.order + block.first;
  const float* tokens[kFew];
  for (int64_t row = 0; row < block.rows; ++row) tokens[row] = space.panel + row * hidden;
  for (int64_t i = from * kGroup; i < to * kGroup && i < inner; i += kGroup) {
    const Mask mask = tail(inner - i);
    Vec gates[kFew], ups[kFew];
    any_few(block.rows, weight + i * hidden, hidden, inner - i, tokens, gates);
    any_few(block.rows, weight + (inner + i) * hidden, hidden, inner - i, tokens, ups);
    for (int64_t row = 0; row < block.rows; ++row) {
      const Vec scaled = mul(mul(silu(gates[row]), ups[row]), splat(p.weight[pairs[row]]));
      store(space.act + row * inner + i, scaled, mask);
      if (p.saved == nullptr) continue;
      T* target = static_cast<T*>(p.saved) + pairs[row] * 2 * inner + i;
      store(target, gates[row], mask);
      store(target + inner, ups[row], mask);
    }
  }
}

// The first product for groups `from` .. `to` of 16 columns of the intermediate.
template <class T>
void up(const Range<T>& range, const Block& block, const Space& space, int64_t from, int64_t to) {
  if (block.rows <= kFew) return up_few(range, block, space, from, to);
  const Experts& p = range.problem;
  const int64_t hidden = p.hidden, inner = p.intermediate;
  const T* weight = static_cast<const T*>(p.gate_up_proj) + block.expert * 2 * inner * hidden;
  const int32_t* pairs = range.plan.order + block.first;
  alignas(64) float weights[kMostTokens] = {}, gate[kGroup * kColumns], up[kGroup * kColumns];
  for (int64_t row = 0; row < block.rows; ++row) weights[row] = p.weight[pairs[row]];
  const Panels panels = {space.panel, block.rows, hidden}, acts = {space.act, block.rows, inner};
  for (int64_t i = from * kGroup; i < to * kGroup && i < inner; i += kGroup) {
    const float *gates[kGroup], *ups[kGroup];
    weight_rows(weight + i * hidden, hidden, inner - i, kGroup, space.scratch, gates);
    weight_rows(weight + (inner + i) * hidden, hidden, inner - i, kGroup, space.scratch + kGroup * hidden, ups);
    for (int number = 0; number < panels.count(); ++number) {
      const int vectors = panels.vectors(number);
      const int64_t ahead = number == 0 ? next_rows<T>(hidden) : 0;
      for (int row = 0; row < kGroup; row += 4) {
        const float* rows[kRows] = {gates[row], gates[row + 1], gates[row + 2], gates[row + 3],
                                    ups[row],   ups[row + 1],   ups[row + 2],   ups[row + 3]};
        any_tile(vectors, rows, hidden, panels.at(number), ahead, gate + row * kColumns, up + row * kColumns);
      }
      for (int64_t row = 0; row < kGroup && i + row < inner; ++row) {
        for (int v = 0; v < vectors; ++v) {
          const Vec g = load(gate + row * kColumns + v * kLanes), u = load(up + row * kColumns + v * kLanes);
          const Vec scaled = mul(mul(silu(g), u), load(weights + number * kColumns + v * kLanes));
          _mm512_store_ps(acts.at(number) + ((i + row) * vectors + v) * kLanes, scaled);
        }
      }
      if (p.saved != nullptr) {
        const int64_t left = block.rows - number * kColumns;
        save<T>(p, pairs + number * kColumns, left < kColumns ? left : kColumns, i, gate, up);
      }
    }
  }
}

template <class T>
void down(const Range<T>& range, const Block& block, const Space& space, int64_t from, int64_t to) {
  const Experts& p = range.problem;
  T* targets[round_up(kMostTokens + 1, kColumns)] = {};
  for (int64_t row = 0; row < block.rows; ++row) {
    targets[row] = range.outputs + range.plan.order[block.first + row] * p.hidden;
  }
  const T* weight = static_cast<const T*>(p.down_proj) + block.expert * p.hidden * p.intermediate;
  const T* no_bias = nullptr;
  if (block.rows <= kFew) {
    const float* tokens[kFew];
    for (int64_t row = 0; row < block.rows; ++row) tokens[row] = space.act + row * p.intermediate;
    return multiply_few(weight, p.hidden, no_bias, tokens, block.rows, p.intermediate, from, to, targets);
  }
  const Panels acts = {space.act, block.rows, p.intermediate};
  multiply_rows(weight, p.hidden, no_bias, acts, from, to, targets, space.scratch);
}

// ---- backward -----------------------------------------------------------------------------------------------------

template <class T>
void backward_block(const Range<T>& range, const Block& block, const Space& space) {
  const Experts& p = range.problem;
  const int64_t hidden = p.hidden, inner = p.intermediate;
  const int32_t* pairs = range.plan.order + block.first;
  for (int64_t row = 0; row < block.rows; ++row) {
    widen_row(static_cast<const T*>(p.grad) + pairs[row] / p.slots * p.grad_stride, hidden, space.panel + row * hidden);
  }
  alignas(64) Vec sums[kMostTokens];
  for (int64_t row = 0; row < block.rows; ++row) sums[row] = zeros();
  const auto activate = [&](int64_t row, int64_t column, Vec grad) {
    float* row_grads = space.act + row * 2 * inner;
    sums[row] = add(sums[row], backward_columns<T>(p, pairs[row], column, grad, row_grads));
  };
  const T* down = static_cast<const T*>(p.down_proj) + block.expert * hidden * inner;
  multiply_columns(down, hidden, inner, space.panel, block.rows, 0, (inner + kColumns - 1) / kColumns, space.scratch,
                   activate);
  for (int64_t row = 0; row < block.rows; ++row) p.grad_weight[pairs[row]] = sum(sums[row]);
  const auto write = [&](int64_t row, int64_t column, Vec values) {
    store(range.outputs + pairs[row] * hidden + column, values, tail(hidden - column));
  };
  const T* gate_up = static_cast<const T*>(p.gate_up_proj) + block.expert * 2 * inner * hidden;
  multiply_columns(gate_up, 2 * inner, hidden, space.act, block.rows, 0, (hidden + kColumns - 1) / kColumns,
                   space.scratch, write);
}

// ---- both ---------------------------------------------------------------------------------------------------------

// Few blocks for many threads: each product in pieces, every block with a place of its own.
template <class T>
void run_pieces(const Range<T>& range, int64_t pieces, int64_t most, float* shared, float* scratch) {
  const Experts& p = range.problem;
  const Plan& plan = range.plan;
  const int64_t rows = round_up(most, kColumns), inner_units = (p.intermediate + kGroup - 1) / kGroup;
  const int64_t hidden_units = (p.hidden + kGroup - 1) / kGroup, tasks = plan.block_count * pieces;
  const auto space_of = [&](int64_t block) {
    float* memory = shared + block * rows * (p.hidden + p.intermediate);
    return Space{memory, memory + rows * p.hidden, scratch};
  };
#pragma omp for schedule(dynamic, 1)
  for (int64_t b = 0; b < plan.block_count; ++b) pack(range, plan.blocks[b], space_of(b).panel);
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    if (scratch == nullptr) continue;
    const int64_t b = task / pieces, piece = task % pieces;
    up(range, plan.blocks[b], space_of(b), inner_units * piece / pieces, inner_units * (piece + 1) / pieces);
  }
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    if (scratch == nullptr) continue;
    const int64_t b = task / pieces, piece = task % pieces;
    down(range, plan.blocks[b], space_of(b), hidden_units * piece / pieces, hidden_units * (piece + 1) / pieces);
  }
}

template <class T>
void run_blocks(const Range<T>& range, bool backward, const Space& space) {
  const Experts& p = range.problem;
#pragma omp for schedule(dynamic, 1)
  for (int64_t b = 0; b < range.plan.block_count; ++b) {
    if (space.panel == nullptr) continue;
    const Block& block = range.plan.blocks[b];
    if (backward) {
      backward_block(range, block, space);
      continue;
    }
    pack(range, block, space.panel);
    up(range, block, space, 0, (p.intermediate + kGroup - 1) / kGroup);
    down(range, block, space, 0, (p.hidden + kGroup - 1) / kGroup);
  }
}

template <class T>
int run(const Experts& p, bool backward) {
  const int64_t most = most_rows(p), rows = round_up(most, kColumns);
  Range<T> range = {p, {}, nullptr};
  const int status = make_plan(p, static_cast<int>(most), kLanes, &range.plan);
  if (status != MOEMB_OK) return status;
  const Plan& plan = range.plan;
  const double size = 6.0 * p.hidden * p.intermediate;
  const int threads = threads_for(size * plan.pairs, size * plan.block_count, p.dtype);
  const int64_t pieces = backward ? 1 : pieces_for(plan.block_count, threads, (p.intermediate + kGroup - 1) / kGroup);
  range.outputs = static_cast<T*>(workspace(kOutputSpace, size_t(p.tokens) * p.slots * p.hidden * sizeof(T)));
  const int64_t block_floats = rows * (p.hidden + (backward ? 2 : 1) * p.intermediate);
  const size_t shared_bytes = pieces > 1 ? plan.block_count * block_floats * sizeof(float) : 0;
  float* shared = static_cast<float*>(workspace(kSharedSpace, shared_bytes));
  if (range.outputs == nullptr || shared == nullptr) return MOEMB_NO_MEMORY;
  if (backward) clear_skipped(p);

  // 32 rows of gate_up_proj, 16 of down_proj; or 48 columns of either
  const int64_t deepest = p.hidden > 2 * p.intermediate ? p.hidden : 2 * p.intermediate;
  const size_t bytes = (block_floats + kColumns * deepest) * sizeof(float);
  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    float* memory = static_cast<float*>(workspace(kPanelSpace, bytes));
    if (memory == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
    // a thread without memory takes its turns and leaves them undone: see experts_amx.cpp
    const Space space = {memory, memory + rows * p.hidden, memory + block_floats};
    if (pieces > 1) run_pieces(range, pieces, most, shared, memory == nullptr ? nullptr : space.scratch);
    else run_blocks(range, backward, space);
#pragma omp for schedule(dynamic, kCombined) nowait
    for (int64_t token = 0; token < p.tokens; ++token) {
      combine(p, range.outputs, static_cast<T*>(backward ? p.grad_states : p.output), token);
    }
  }
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

int run(const Experts& p, bool backward) {
  if (p.dtype == MOEMB_FP32) return run<float>(p, backward);
  return p.dtype == MOEMB_BF16 ? run<Bf16>(p, backward) : run<Fp16>(p, backward);
}

}  // namespace

int experts_forward_avx512(const Experts& problem) { return run(problem, false); }
int experts_backward_avx512(const Experts& problem) { return run(problem, true); }

}  // namespace moemb

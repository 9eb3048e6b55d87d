// A linear layer in fp32 arithmetic on AVX-512, forward and its gradient of the input.
#include <omp.h>

#include "gemm_avx512.h"

namespace moemb {
namespace {

template <class T>
void forward_task(const Linear& p, int64_t first, int64_t count, int64_t from, int64_t to, float* space) {
  const Panels panels = {space, count, p.inputs};
  const T* rows[kMostTokens] = {};
  T* targets[kMostTokens] = {};
  for (int64_t row = 0; row < count; ++row) {
    rows[row] = static_cast<const T*>(p.source) + (first + row) * p.source_stride;
    targets[row] = static_cast<T*>(p.target) + (first + row) * p.outputs;
  }
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  if (count <= kFew) {
    const float* tokens[kFew];
    for (int64_t row = 0; row < count; ++row) {
      widen_row(rows[row], p.inputs, space + row * p.inputs);
      tokens[row] = space + row * p.inputs;
    }
    return multiply_few(weight, p.outputs, bias, tokens, count, p.inputs, from, to, targets);
  }
  for (int number = 0; number < panels.count(); ++number) {
    pack_tokens(rows + number * kColumns, panels.vectors(number), p.inputs, panels.at(number));
  }
  multiply_rows(weight, p.outputs, bias, panels, from, to, targets,
                space + round_up(Panels::floats(count, p.inputs), kLanes));
}

template <class T>
void backward_task(const Linear& p, int64_t first, int64_t count, int64_t from, int64_t to, float* space) {
  for (int64_t row = 0; row < count; ++row) {
    widen_row(static_cast<const T*>(p.source) + (first + row) * p.source_stride, p.outputs, space + row * p.outputs);
  }
  T* target = static_cast<T*>(p.target) + first * p.inputs;
  const auto write = [&](int64_t row, int64_t column, Vec sums) {
    store(target + row * p.inputs + column, sums, tail(p.inputs - column));
  };
  float* panel = space + round_up(count * p.outputs, kLanes);
  multiply_columns(static_cast<const T*>(p.weight), p.outputs, p.inputs, space, count, from, to, panel, write);
}

using Task = void (*)(const Linear&, int64_t, int64_t, int64_t, int64_t, float*);

int run(const Linear& p, int64_t width, int64_t units, int64_t extra_rows, Task task) {
  if (p.rows == 0) return MOEMB_OK;
  const int64_t most = block_tokens(width), blocks = (p.rows + most - 1) / most;
  const int64_t rows = round_up((p.rows + blocks - 1) / blocks, kLanes);
  const int threads = threads_for(2.0 * p.rows * p.outputs * p.inputs, 4.0 * p.outputs * p.inputs, p.dtype);
  const int64_t pieces = pieces_for(blocks, threads, units), tasks = blocks * pieces;
  const size_t bytes = ((rows + kLanes + extra_rows) * width + 2 * kLanes) * sizeof(float);
  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    float* space = static_cast<float*>(workspace(kPanelSpace, bytes));
    if (space == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t number = 0; number < tasks; ++number) {
      const int64_t first = number / pieces * rows, piece = number % pieces;
      const int64_t count = p.rows - first < rows ? p.rows - first : rows;
      if (space == nullptr || count <= 0) continue;
      task(p, first, count, units * piece / pieces, units * (piece + 1) / pieces, space);
    }
  }
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace

int linear_forward_avx512(const Linear& p) {
  const Task task = p.dtype == MOEMB_FP32 ? forward_task<float>
                    : p.dtype == MOEMB_BF16 ? forward_task<Bf16> : forward_task<Fp16>;
  return run(p, p.inputs, (p.outputs + kGroup - 1) / kGroup, kGroup, task);
}

int linear_backward_avx512(const Linear& p) {
  const Task task = p.dtype == MOEMB_FP32 ? backward_task<float>
                    : p.dtype == MOEMB_BF16 ? backward_task<Bf16> : backward_task<Fp16>;
  return run(p, p.outputs, (p.inputs + kColumns - 1) / kColumns, kColumns, task);
}

}  // namespace moemb

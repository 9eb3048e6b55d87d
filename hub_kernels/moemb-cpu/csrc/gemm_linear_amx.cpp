// A linear layer in bf16 on AMX, forward and its gradient of the input.
#include <omp.h>

#include "gemm_amx_products.h"

namespace moemb {
namespace {

constexpr int64_t kMostRows = kMostTokenTiles * kTileRows;

// Rows of a block, so that its packed values take at most one MB, and blocks enough for all threads.
int64_t block_rows(int64_t k_blocks) {
  const int64_t rows = (1 << 20) / (k_blocks * kStep * 2) / 32 * 32;
  return rows < 64 ? 64 : (rows > kMostRows ? kMostRows : rows);
}

struct Cut {
  int64_t blocks, rows, pieces;  // of the batch; rows per block; pieces of the weight rows per block
  int threads;
};

Cut cut_work(const Linear& p, int64_t k_blocks, int64_t units) {
  Cut cut;
  const int64_t most = block_rows(k_blocks);
  cut.blocks = (p.rows + most - 1) / most;
  cut.rows = round_up((p.rows + cut.blocks - 1) / cut.blocks, 32);
  cut.blocks = (p.rows + cut.rows - 1) / cut.rows;
  cut.threads = threads_for(2.0 * p.rows * p.outputs * p.inputs, 2.0 * p.outputs * p.inputs, p.dtype);
  cut.pieces = pieces_for(cut.blocks, cut.threads, units);
  return cut;
}

void forward_task(const Linear& p, int64_t first, int64_t count, int64_t from, int64_t to, char* panel, char* space) {
  const int64_t k_blocks = round_up(p.inputs, kStep) / kStep, tiles = (count + kTileRows - 1) / kTileRows;
  const Bf16* source = static_cast<const Bf16*>(p.source) + first * p.source_stride;
  Bf16* targets[kMostRows] = {};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Bf16* rows[kTileRows];
    for (int64_t row = 0; row < kTileRows; ++row) {
      const int64_t number = tile * kTileRows + row;
      const bool exists = number < count;
      rows[row] = exists ? source + number * p.source_stride : nullptr;
      if (exists) targets[number] = static_cast<Bf16*>(p.target) + (first + number) * p.outputs;
    }
    pack_token_tile(rows, p.inputs, panel + tile * k_blocks * kTile);
  }
  stores_before_tiles();
  multiply_rows(static_cast<const Bf16*>(p.weight), p.outputs, p.inputs, static_cast<const Bf16*>(p.bias), panel, tiles,
                from, to, targets, false, space);
}

// Each task packs its own rows, also where several tasks share a block: packing is cheap beside 32 weight rows.
template <class Task>
int run(const Linear& p, const Cut& cut, int64_t units, size_t panel_bytes, size_t space_bytes, Task task) {
  const int64_t tasks = cut.blocks * cut.pieces;
  int failed = 0;
#pragma omp parallel num_threads(cut.threads)
  {
    const Tiles tiles;
    char* panel = static_cast<char*>(workspace(kPanelSpace, panel_bytes + space_bytes));
    if (panel == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t number = 0; number < tasks; ++number) {
      const int64_t first = number / cut.pieces * cut.rows, piece = number % cut.pieces;
      const int64_t count = p.rows - first < cut.rows ? p.rows - first : cut.rows;
      if (panel == nullptr) continue;
      task(p, first, count, units * piece / cut.pieces, units * (piece + 1) / cut.pieces, panel, panel + panel_bytes);
    }
  }
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

void backward_task(const Linear& p, int64_t first, int64_t count, int64_t from, int64_t to, char* panel, char* space) {
  const int64_t depth = round_up(p.outputs, kStep), total = round_up(count, 32);
  Bf16* rows = reinterpret_cast<Bf16*>(panel);
  const int64_t stride = depth + kStep;
  copy_rows(static_cast<const Bf16*>(p.source) + first * p.source_stride, p.source_stride, count, total, p.outputs,
            depth, stride, rows);
  Bf16* target = static_cast<Bf16*>(p.target) + first * p.inputs;
  const auto write = [&](int64_t row, int64_t column, Vec low, Vec high) {
    if (row >= count) return;
    _mm512_mask_storeu_epi16(target + row * p.inputs + column, tail32(p.inputs - column), narrow_pair(low, high));
  };
  const Bf16* weight = static_cast<const Bf16*>(p.weight);
  multiply_columns(weight, p.outputs, p.inputs, rows, stride, total, from, to, space, write);
}

}  // namespace

int linear_forward_amx(const Linear& p) {
  if (p.rows == 0) return MOEMB_OK;
  const int64_t k_blocks = round_up(p.inputs, kStep) / kStep, units = (p.outputs + 31) / 32;
  const Cut cut = cut_work(p, k_blocks, units);
  const size_t panel_bytes = round_up(cut.rows, 32) / kTileRows * k_blocks * kTile;
  return run(p, cut, units, panel_bytes, kMultiplySpace, forward_task);
}

int linear_backward_amx(const Linear& p) {
  if (p.rows == 0) return MOEMB_OK;
  const int64_t k_blocks = round_up(p.outputs, kStep) / kStep, units = (p.inputs + 31) / 32;
  const Cut cut = cut_work(p, k_blocks, units);
  const size_t panel_bytes = round_up(round_up(cut.rows, 32) * (k_blocks + 1) * kStep * 2, 4096);
  return run(p, cut, units, panel_bytes, kColumnSpace, backward_task);
}

}  // namespace moemb

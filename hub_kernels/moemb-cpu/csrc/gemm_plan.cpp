// The plan of row blocks, workspaces and thread counts of the grouped products.
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "gemm.h"

namespace moemb {

namespace {

struct Space {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Space() { free(memory); }
};

thread_local Space spaces[kWorkspaces];

constexpr size_t kHugePage = size_t(2) << 20;

}  // namespace

void* workspace(Workspace which, size_t bytes) {
  Space& space = spaces[which];
  if (bytes <= space.bytes && space.memory != nullptr) return space.memory;
  free(space.memory);
  space.memory = nullptr;
  space.bytes = 0;
  const bool large = bytes >= kHugePage / 8;
  const size_t size = round_up(bytes + bytes / 8 + 1, large ? kHugePage : 4096);  // a little more: sizes creep up
  if (posix_memalign(&space.memory, large ? kHugePage : 4096, size) != 0) {
    space.memory = nullptr;
    return nullptr;
  }
  if (large) madvise(space.memory, size, MADV_HUGEPAGE);  // 512 times fewer page faults; a hint only
  space.bytes = size;
  return space.memory;
}

int make_plan(const Experts& problem, int most, int step, Plan* plan) {
  const int64_t pairs = problem.tokens * problem.slots, experts = problem.experts;
  // every expert adds at most one block beyond pairs / step
  const int64_t blocks_bound = pairs / step + experts;
  const size_t order_bytes = round_up(pairs * sizeof(int32_t), 64);
  const size_t place_bytes = round_up((experts + 2) * sizeof(int32_t), 64);
  char* memory = static_cast<char*>(workspace(kPlanSpace, order_bytes + place_bytes + blocks_bound * sizeof(Block)));
  if (memory == nullptr) return MOEMB_NO_MEMORY;
  int32_t* order = reinterpret_cast<int32_t*>(memory);
  int32_t* place = reinterpret_cast<int32_t*>(memory + order_bytes);  // where each expert's next pair goes
  Block* blocks = reinterpret_cast<Block*>(memory + order_bytes + place_bytes);

  memset(place, 0, (experts + 2) * sizeof(int32_t));
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t expert = problem.index[pair];
    if (expert < 0 || expert > experts) return MOEMB_BAD_ARGUMENT;
    place[expert + 1] += 1;
  }
  for (int64_t expert = 0; expert < experts; ++expert) place[expert + 1] += place[expert];
  const int32_t kept = place[experts];
  int32_t count = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int32_t rows = place[expert + 1] - place[expert];
    if (rows == 0) continue;
    const int32_t parts = (rows + most - 1) / most;
    const int32_t size = static_cast<int32_t>(round_up((rows + parts - 1) / parts, step));
    for (int32_t done = 0; done < rows; done += size) {
      blocks[count++] = {static_cast<int32_t>(expert), place[expert] + done, size < rows - done ? size : rows - done};
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t expert = problem.index[pair];
    if (expert < experts) order[place[expert]++] = static_cast<int32_t>(pair);
  }
  *plan = {order, blocks, kept, count};
  return MOEMB_OK;
}

int64_t tokens_at_once(const Experts& problem) {
  // 1024 rows per expert make the products' cost outweigh the reading of the weights
  const int64_t wanted = 1024 * problem.experts / (problem.slots > 0 ? problem.slots : 1);
  const int64_t tokens = wanted < 512 ? 512 : (wanted > 8192 ? 8192 : wanted);
  if (problem.tokens <= tokens + tokens / 2) return problem.tokens;
  return tokens;
}

int threads_for(double operations, double bytes, int dtype) {
  const double per_second = dtype == MOEMB_BF16 ? 1e12 : 1.5e11;
  if (operations / per_second + bytes / 2e10 < 20e-6) return 1;
  return omp_get_max_threads();
}

int64_t pieces_for(int64_t blocks, int threads, int64_t most) {
  if (threads == 1 || blocks >= 4 * threads || blocks == 0) return 1;
  const int64_t pieces = (4 * threads + blocks - 1) / blocks;
  return pieces < most ? pieces : (most > 0 ? most : 1);
}

}  // namespace moemb

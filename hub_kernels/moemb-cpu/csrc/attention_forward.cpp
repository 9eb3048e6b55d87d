// Varlen attention with an online softmax, fp32 arithmetic on AVX-512. A task is a block of queries of one segment and
// key head; what it computes depends on its segment alone.
#include <math.h>

#include "attention.h"

namespace moemb {
namespace {

// Buffers of one thread.
struct Forward {
  float* queries;     // (lanes, padded), scaled to base-2 exponents
  float* transposed;  // (padded, lanes)
  float* output;      // (lanes, padded)
  float* keys;        // (kKeyBlock, padded)
  float* values;      // (kKeyBlock, padded)
  float* scores;      // (kKeyBlock, kLaneBlock)
  float* largest;     // (lanes)
  float* total;       // (lanes)
  float* decay;       // (kLaneBlock), what the new maximum makes of earlier sums
};

bool allocate(int64_t lanes, int64_t padded, Forward& work) {
  static thread_local Scratch scratch;
  const int64_t wide = lanes * padded, block = kKeyBlock * padded;
  float* next = scratch.floats(3 * wide + 2 * block + kKeyBlock * kLaneBlock + 2 * lanes + kLaneBlock);
  if (next == nullptr) return false;
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  work = {take(wide),  take(wide),  take(wide),      take(block), take(block), take(kKeyBlock * kLaneBlock),
          take(lanes), take(lanes), take(kLaneBlock)};
  return true;
}

// Online softmax of one block: `scores` (keys, lanes) become probabilities up to the total, `decay` is filled. With
// `positions`, keys after the query of a lane are hidden. Returns whether earlier sums must be rescaled.
bool softmax_step(float* scores, int64_t keys, int64_t lanes, float* largest, float* total, float* decay,
                  const __m512i* positions, int64_t first_key) {
  bool rescale = false;
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const Vec before = load(largest + lane);
    Vec now = before;
    for (int64_t key = 0; key < keys; ++key) {
      Vec score = load(scores + key * kLaneBlock + lane);
      if (positions != nullptr) {
        score = hide_future(score, first_key + key, positions[lane / kLanes]);
        store(scores + key * kLaneBlock + lane, score);
      }
      now = _mm512_max_ps(score, now);
    }
    const Vec factor = exp2(sub(before, now));
    Vec sums[2] = {mul(load(total + lane), factor), zeros()};
    for (int64_t key = 0; key < keys; ++key) {
      float* score = scores + key * kLaneBlock + lane;
      const Vec probability = exp2(sub(load(score), now));
      sums[key & 1] = add(sums[key & 1], probability);
      store(score, probability);
    }
    store(largest + lane, now);
    store(total + lane, add(sums[0], sums[1]));
    store(decay + lane, factor);
    rescale |= _mm512_cmp_ps_mask(factor, splat(1.0f), _CMP_NEQ_UQ) != 0;
  }
  return rescale;
}

// Keys `first` .. `first + count` for all lanes of the task.
void attend_block(const Forward& work, const Task& task, const HeadRows& keys, const HeadRows& values, int64_t first,
                  int64_t count, int64_t lanes, int64_t padded, int64_t repeat, bool causal) {
  const int64_t task_lanes = round_up(lanes, kLanes);
  for (int64_t lane = 0; lane < lanes; lane += kLaneBlock) {
    const int64_t width = smaller(kLaneBlock, task_lanes - lane), rows = smaller(kLaneBlock, lanes - lane);
    Window window;
    set_window(task, causal, first, count, lane, rows, width, repeat, window);
    const int64_t visible = window.visible;
    if (visible <= 0) continue;
    product({keys.rows, keys.stride, 1, work.transposed + lane, task_lanes, padded, work.scores, kLaneBlock, false},
            visible, width);
    const bool rescale = softmax_step(work.scores, visible, width, work.largest + lane, work.total + lane, work.decay,
                                      window.positions, first);
    float* output = work.output + lane * padded;
    for (int64_t row = 0; rescale && first > 0 && row < rows; ++row) {
      const Vec factor = splat(work.decay[row]);
      for (int64_t column = 0; column < padded; column += kLanes) {
        store(output + row * padded + column, mul(load(output + row * padded + column), factor));
      }
    }
    product({work.scores, 1, kLaneBlock, values.rows, values.stride, visible, output, padded, first > 0}, rows, padded);
  }
}

template <typename T>
void attend_task(const MoembAttention& inputs, const Task& task, const Forward& work, T* output, float* log_sum) {
  const int64_t repeat = inputs.heads / inputs.key_heads, dim = inputs.dim, padded = round_up(dim, kLanes);
  const int64_t lanes = task.queries * repeat, task_lanes = round_up(lanes, kLanes);
  const float scale = inputs.scaling * 1.44269504f;
  const T* queries = static_cast<const T*>(inputs.query) + (task.origin + task.query) * inputs.query_stride[0] +
                     task.key_head * repeat * inputs.query_stride[1];
  const T* keys =
      static_cast<const T*>(inputs.key) + task.start * inputs.key_stride[0] + task.key_head * inputs.key_stride[1];
  const T* values = static_cast<const T*>(inputs.value) + task.start * inputs.value_stride[0] +
                    task.key_head * inputs.value_stride[1];
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const T* row = queries + lane / repeat * inputs.query_stride[0] + lane % repeat * inputs.query_stride[1];
    widen_row(row, dim, padded, scale, work.queries + lane * padded);
  }
  memset(work.queries + lanes * padded, 0, (task_lanes - lanes) * padded * sizeof(float));
  transpose_rows(work.queries, task_lanes, padded, work.transposed, task_lanes);
  for (int64_t lane = 0; lane < task_lanes; ++lane) {
    work.largest[lane] = -__builtin_inff();
    work.total[lane] = 0.0f;
  }
  const int64_t seen = inputs.causal ? task.query + task.queries : task.length;
  for (int64_t first = 0; first < seen; first += kKeyBlock) {
    const int64_t count = smaller(kKeyBlock, seen - first);
    attend_block(
        work, task, head_rows(keys + first * inputs.key_stride[0], inputs.key_stride[0], count, dim, padded, work.keys),
        head_rows(values + first * inputs.value_stride[0], inputs.value_stride[0], count, dim, padded, work.values),
        first, count, lanes, padded, repeat, inputs.causal != 0);
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t row = (task.origin + task.query + lane / repeat) * inputs.heads + task.key_head * repeat;
    const Vec inverse = splat(1.0f / work.total[lane]);
    T* target = output + (row + lane % repeat) * dim;
    for (int64_t column = 0; column < dim; column += kLanes) {
      store(target + column, mul(load(work.output + lane * padded + column), inverse), tail(dim - column));
    }
    if (log_sum != nullptr) log_sum[row + lane % repeat] = work.largest[lane] + log2f(work.total[lane]);
  }
}

template <typename T>
int attend(const MoembAttention& inputs, T* output, float* log_sum) {
  const int64_t queries = task_queries(inputs), count = list_tasks(inputs, queries, nullptr);
  const int64_t lanes = round_up(queries * (inputs.heads / inputs.key_heads), kLanes);
  const int64_t padded = round_up(inputs.dim, kLanes);
  Task* tasks = static_cast<Task*>(malloc((count + 1) * sizeof(Task)));
  if (tasks == nullptr) return MOEMB_NO_MEMORY;
  list_tasks(inputs, queries, tasks);
  bool failed = false;
#pragma omp parallel if (count > 1 && score_work(inputs) > kSerialWork)
  {
    Forward work;
    const bool ready = allocate(lanes, padded, work);
    if (!ready) {
#pragma omp atomic write
      failed = true;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t index = 0; index < count; ++index) {
      // the longest blocks of a causal segment come last in the list and are started first
      if (ready) attend_task(inputs, tasks[count - 1 - index], work, output, log_sum);
    }
  }
  free(tasks);
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" int moemb_cpu_attention(const MoembAttention* inputs, void* output, float* log_sum) {
  if (!valid_segments(*inputs)) return MOEMB_BAD_ARGUMENT;
  if (inputs->dtype == MOEMB_FP32) return attend(*inputs, static_cast<float*>(output), log_sum);
  // the softmax on AMX finds the maximum before it scales
  if (moemb_cpu_isa() >= MOEMB_ISA_AMX && inputs->scaling > 0.0f) {
    return moemb_cpu_attention_amx(inputs, output, log_sum);
  }
  return attend(*inputs, static_cast<Bf16*>(output), log_sum);
}

// Backward of varlen attention: probabilities are recomputed from the saved sums of exponentials. fp32 arithmetic on
// AVX-512. A task is one segment and key head; it adds up the gradients of its keys and values in a fixed order.
#include "attention.h"

namespace moemb {
namespace {

// Buffers of one thread; `length` is that of the longest segment.
struct Backward {
  float* queries;     // (lanes, padded), scaled to base-2 exponents
  float* queries_t;   // (padded, lanes)
  float* grads;       // (lanes, padded), gradient of the output
  float* grads_t;     // (padded, lanes)
  float* grad_query;  // (lanes, padded)
  float* keys;        // (kKeyBlock, padded)
  float* values;      // (kKeyBlock, padded)
  float* scores;      // (kKeyBlock, kLaneBlock), then probabilities
  float* slopes;      // (kKeyBlock, kLaneBlock), gradient of the scores
  float* log_sum;     // (lanes)
  float* shift;       // (lanes), sum of gradient times output
  float* grad_key;    // (length, padded)
  float* grad_value;  // (length, padded)
};

bool allocate(int64_t lanes, int64_t padded, int64_t length, Backward& work) {
  static thread_local Scratch scratch;
  const int64_t wide = lanes * padded, block = kKeyBlock * padded, square = kKeyBlock * kLaneBlock;
  float* next = scratch.floats(5 * wide + 2 * block + 2 * square + 2 * lanes + 2 * length * padded);
  if (next == nullptr) return false;
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  work.queries = take(wide);
  work.queries_t = take(wide);
  work.grads = take(wide);
  work.grads_t = take(wide);
  work.grad_query = take(wide);
  work.keys = take(block);
  work.values = take(block);
  work.scores = take(square);
  work.slopes = take(square);
  work.log_sum = take(lanes);
  work.shift = take(lanes);
  work.grad_key = take(length * padded);
  work.grad_value = take(length * padded);
  return true;
}

// scores -> probabilities, slopes (gradients of the probabilities) -> gradients of the scores, (keys, lanes).
void slopes_step(float* scores, float* slopes, int64_t keys, int64_t lanes, const float* log_sum, const float* shift,
                 const __m512i* positions, int64_t first_key) {
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const Vec sums = load(log_sum + lane), along = load(shift + lane);
    for (int64_t key = 0; key < keys; ++key) {
      float *score = scores + key * kLaneBlock + lane, *slope = slopes + key * kLaneBlock + lane;
      Vec exponent = sub(load(score), sums);
      if (positions != nullptr) exponent = hide_future(exponent, first_key + key, positions[lane / kLanes]);
      const Vec probability = exp2(exponent);
      store(score, probability);
      store(slope, mul(probability, sub(load(slope), along)));
    }
  }
}

// Keys `first` .. `first + count` and all lanes of a block of queries.
void backward_block(const Backward& work, const Task& task, const HeadRows& keys, const HeadRows& values, int64_t first,
                    int64_t count, int64_t lanes, int64_t padded, int64_t repeat, bool causal) {
  const int64_t task_lanes = round_up(lanes, kLanes);
  float *grad_key = work.grad_key + first * padded, *grad_value = work.grad_value + first * padded;
  for (int64_t lane = 0; lane < lanes; lane += kLaneBlock) {
    const int64_t width = smaller(kLaneBlock, task_lanes - lane), rows = smaller(kLaneBlock, lanes - lane);
    Window window;
    set_window(task, causal, first, count, lane, rows, width, repeat, window);
    const int64_t visible = window.visible;
    if (visible <= 0) continue;
    product({keys.rows, keys.stride, 1, work.queries_t + lane, task_lanes, padded, work.scores, kLaneBlock, false},
            visible, width);
    product({values.rows, values.stride, 1, work.grads_t + lane, task_lanes, padded, work.slopes, kLaneBlock, false},
            visible, width);
    slopes_step(work.scores, work.slopes, visible, width, work.log_sum + lane, work.shift + lane,
                window.positions, first);
    const float *queries = work.queries + lane * padded, *grads = work.grads + lane * padded;
    product({work.slopes, 1, kLaneBlock, keys.rows, keys.stride, visible, work.grad_query + lane * padded, padded,
             first > 0},
            rows, padded);
    product({work.slopes, kLaneBlock, 1, queries, padded, rows, grad_key, padded, true}, visible, padded);
    product({work.scores, kLaneBlock, 1, grads, padded, rows, grad_value, padded, true}, visible, padded);
  }
}

// Lanes of a block of queries: scaled queries, gradients, both transposed, sums.
template <typename T>
void read_lanes(const MoembAttention& inputs, const Task& task, const Backward& work, const T* output,
                const float* log_sum, const T* grad_output) {
  const int64_t repeat = inputs.heads / inputs.key_heads, dim = inputs.dim, padded = round_up(dim, kLanes);
  const int64_t lanes = task.queries * repeat, task_lanes = round_up(lanes, kLanes);
  const T* queries = static_cast<const T*>(inputs.query) + task.key_head * repeat * inputs.query_stride[1];
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t token = task.start + task.query + lane / repeat, head = lane % repeat;
    const int64_t row = token * inputs.heads + task.key_head * repeat + head;
    widen_row(queries + token * inputs.query_stride[0] + head * inputs.query_stride[1], dim, padded,
              inputs.scaling * 1.44269504f, work.queries + lane * padded);
    widen_row(grad_output + row * dim, dim, padded, 1.0f, work.grads + lane * padded);
    Vec along = zeros();
    for (int64_t column = 0; column < dim; column += kLanes) {
      const Vec value = load(output + row * dim + column, tail(dim - column));
      along = fma(value, load(work.grads + lane * padded + column), along);
    }
    work.shift[lane] = sum(along);
    work.log_sum[lane] = log_sum[row];
  }
  // lanes beyond the last query: zero rows have probability 1 and gradient 0
  memset(work.queries + lanes * padded, 0, (task_lanes - lanes) * padded * sizeof(float));
  memset(work.grads + lanes * padded, 0, (task_lanes - lanes) * padded * sizeof(float));
  memset(work.shift + lanes, 0, (task_lanes - lanes) * sizeof(float));
  memset(work.log_sum + lanes, 0, (task_lanes - lanes) * sizeof(float));
  transpose_rows(work.queries, task_lanes, padded, work.queries_t, task_lanes);
  transpose_rows(work.grads, task_lanes, padded, work.grads_t, task_lanes);
}

template <typename T>
void narrow_row(const float* source, int64_t dim, float factor, T* target) {
  for (int64_t column = 0; column < dim; column += kLanes) {
    store(target + column, mul(load(source + column), splat(factor)), tail(dim - column));
  }
}

// All queries of one segment and key head.
template <typename T>
void backward_task(const MoembAttention& inputs, const Task& segment, int64_t step, const Backward& work,
                   const T* output, const float* log_sum, const T* grad_output, T* grad_query, T* grad_key,
                   T* grad_value) {
  const int64_t repeat = inputs.heads / inputs.key_heads, dim = inputs.dim, padded = round_up(dim, kLanes);
  const int64_t key_step = inputs.key_stride[0], value_step = inputs.value_stride[0];
  const T* keys =
      static_cast<const T*>(inputs.key) + segment.start * key_step + segment.key_head * inputs.key_stride[1];
  const T* values =
      static_cast<const T*>(inputs.value) + segment.start * value_step + segment.key_head * inputs.value_stride[1];
  memset(work.grad_key, 0, segment.length * padded * sizeof(float));
  memset(work.grad_value, 0, segment.length * padded * sizeof(float));
  for (int64_t query = 0; query < segment.length; query += step) {
    Task task = segment;
    task.query = query;
    task.queries = smaller(step, segment.length - query);
    const int64_t lanes = task.queries * repeat;
    read_lanes(inputs, task, work, output, log_sum, grad_output);
    const int64_t seen = inputs.causal ? query + task.queries : segment.length;
    for (int64_t first = 0; first < seen; first += kKeyBlock) {
      const int64_t count = smaller(kKeyBlock, seen - first);
      backward_block(work, task, head_rows(keys + first * key_step, key_step, count, dim, padded, work.keys),
                     head_rows(values + first * value_step, value_step, count, dim, padded, work.values), first, count,
                     lanes, padded, repeat, inputs.causal != 0);
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = (segment.start + query + lane / repeat) * inputs.heads + segment.key_head * repeat;
      narrow_row(work.grad_query + lane * padded, dim, inputs.scaling, grad_query + (row + lane % repeat) * dim);
    }
  }
  for (int64_t key = 0; key < segment.length; ++key) {
    const int64_t row = ((segment.start + key) * inputs.key_heads + segment.key_head) * dim;
    // the queries were scaled by scaling / ln 2
    narrow_row(work.grad_key + key * padded, dim, 0.693147181f, grad_key + row);
    narrow_row(work.grad_value + key * padded, dim, 1.0f, grad_value + row);
  }
}

template <typename T>
int backward(const MoembAttention& inputs, const T* output, const float* log_sum, const T* grad_output, T* grad_query,
             T* grad_key, T* grad_value) {
  int64_t longest = 1;
  for (int64_t segment = 0; segment < inputs.segments; ++segment) {
    const int64_t length = inputs.cu_seqlens[segment + 1] - inputs.cu_seqlens[segment];
    if (length > longest) longest = length;
  }
  const int64_t count = list_tasks(inputs, longest, nullptr), queries = task_queries(inputs);
  const int64_t lanes = round_up(queries * (inputs.heads / inputs.key_heads), kLanes);
  Task* tasks = static_cast<Task*>(malloc((count + 1) * sizeof(Task)));
  if (tasks == nullptr) return MOEMB_NO_MEMORY;
  list_tasks(inputs, longest, tasks);
  bool failed = false;
#pragma omp parallel if (count > 1 && score_work(inputs) > kSerialWork)
  {
    Backward work;
    const bool ready = allocate(lanes, round_up(inputs.dim, kLanes), longest, work);
    if (!ready) {
#pragma omp atomic write
      failed = true;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t index = 0; index < count; ++index) {
      if (!ready) continue;
      backward_task(inputs, tasks[index], queries, work, output, log_sum, grad_output, grad_query, grad_key,
                    grad_value);
    }
  }
  free(tasks);
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" int moemb_cpu_attention_backward(const MoembAttention* inputs, const void* output, const float* log_sum,
                                            const void* grad_output, void* grad_query, void* grad_key,
                                            void* grad_value) {
  if (!valid_segments(*inputs)) return MOEMB_BAD_ARGUMENT;
  if (inputs->dtype == MOEMB_FP32) {
    return backward(*inputs, static_cast<const float*>(output), log_sum, static_cast<const float*>(grad_output),
                    static_cast<float*>(grad_query), static_cast<float*>(grad_key), static_cast<float*>(grad_value));
  }
  return backward(*inputs, static_cast<const Bf16*>(output), log_sum, static_cast<const Bf16*>(grad_output),
                  static_cast<Bf16*>(grad_query), static_cast<Bf16*>(grad_key), static_cast<Bf16*>(grad_value));
}

// Backward pass of the gated delta rule: one task per segment and key head. Nothing is saved by the forward pass; a
// first sweep over the chunks finds the state before each of them, a second one runs from the last chunk to the first
// with the gradient of the state.
//
// With the names of gated_delta.h, w_i = exp(G_c - G_i), A_ij = exp(G_i - G_j) k_i k_j (j < i), P_ij = exp(G_i - G_j)
// q_i k_j (j <= i), and dS' the gradient of the state behind the chunk:
//   du = P^T do + w K dS'            y = du - A^T (beta y), from the last row to the first;  b = beta y
//   dbeta = y . t   dv = b           dP = do u^T, dA = -b u^T
//   dq = exp(G) do S^T + (decay * dP) K
//   dk = -exp(G) b S^T + w u dS'^T + (decay * dP)^T Q + (decay * dA) K + (decay * dA)^T K
//   dS = exp(G_c) dS' + (exp(G) Q)^T do - (exp(G) K)^T b
//   dG_i: every factor exp(G_i - G_j) gives its product with the gradient to i and takes it from j; G_c likewise.
#include <initializer_list>

#include "gated_delta.h"

namespace moemb {
namespace {

struct Buffers {
  float *key, *query, *grad_key, *grad_query;    // (chunk, key)
  float* from_state;                             // (chunk, key): a gradient through the state
  float* key_columns;                            // (key, chunk)
  float *key_key, *query_key;                    // (chunk, chunk), lower triangles from here on
  float *system, *attention, *pairs;             // A, P, exp(G_i - G_j)
  float *grad_attention, *grad_system;           // do u^T, b u^T
  float *sum_attention, *sum_system;             // decay * dP and decay * dA, summed over the value heads of a key head
  float *solved, *written;                       // (chunk, value): t, u
  float *grad_out, *grad_solved, *grad_written;  // (chunk, value): do, b, y
  float* written_columns;                        // (value, chunk)
  float* grad_state_columns;                     // (value, key)
  float *inverse_key, *inverse_query;            // (chunk)
  float* grad_running;                           // (chunk): dG
  float *state, *grad_state;                     // repeat x (key, value)
  // one slot per chunk but the last and per value head
  float* saved_solved;         // (chunk, value): t
  float* saved_state_columns;  // (value, key): the state behind the chunk, transposed
  int chunk_row;
  size_t solved_slot, state_slot, floats;

  Buffers(float* block, const Shape& shape, int chunk, int chunks) {
    Carver carver(block);
    chunk_row = padded_row(chunk);
    for (float** rows : {&key, &query, &grad_key, &grad_query, &from_state}) *rows = carver.take(chunk, shape.key_row);
    key_columns = carver.take(shape.key, chunk_row);
    for (float** square : {&key_key, &query_key, &system, &attention, &pairs, &grad_attention, &grad_system,
                           &sum_attention, &sum_system}) {
      *square = carver.take(chunk, chunk_row);
    }
    for (float** rows : {&solved, &written, &grad_out, &grad_solved, &grad_written}) {
      *rows = carver.take(chunk, shape.value_row);
    }
    written_columns = carver.take(shape.value, chunk_row);
    for (float** scalars : {&inverse_key, &inverse_query, &grad_running}) *scalars = carver.take(1, kChunk);
    solved_slot = static_cast<size_t>(chunk) * shape.value_row;
    state_slot = static_cast<size_t>(shape.value) * shape.key_row;
    if (chunks > 1) {
      const size_t slots = static_cast<size_t>(chunks - 1) * shape.repeat;
      grad_state_columns = carver.take(shape.value, shape.key_row);
      state = carver.take(static_cast<size_t>(shape.repeat) * shape.key, shape.value_row);
      grad_state = carver.take(static_cast<size_t>(shape.repeat) * shape.key, shape.value_row);
      saved_solved = carver.take(slots, solved_slot);
      saved_state_columns = carver.take(slots, state_slot);
    }
    floats = carver.used();
  }
};

struct Gradients {
  const void* out;
  void *query, *key, *value;
  float *decay, *beta;
};

struct Chunk {
  int64_t token;  // first one
  int count;
  int index;
  bool first, last;
};

struct Task {
  const MoembGatedDelta& p;
  const Shape& shape;
  const Gradients& grads;
  int64_t key_head;
  Buffers b;

  int64_t head(int h) const { return key_head * shape.repeat + h; }
  int64_t scalar(const Chunk& chunk, int h) const { return chunk.token * p.value_heads + head(h); }
  float* state(int h) const { return b.state + static_cast<int64_t>(h) * shape.key * shape.value_row; }
  float* grad_state(int h) const { return b.grad_state + static_cast<int64_t>(h) * shape.key * shape.value_row; }
  float* saved_solved(int index, int h) const { return b.saved_solved + (index * shape.repeat + h) * b.solved_slot; }
  float* saved_state(int index, int h) const {
    return b.saved_state_columns + (index * shape.repeat + h) * b.state_slot;
  }

  void load_keys(const Chunk& chunk);
  void load_queries(const Chunk& chunk);
  void solve_values(const Chunk& chunk, int h, const Factors& factors, float* solved);
  void sweep(const Chunk& chunk);
  void reverse_head(const Chunk& chunk, int h);
  void gradient_of_solved(const Chunk& chunk, int h, const Factors& factors, const float* solved);
  void gradient_of_pairs(const Chunk& chunk);
  void gradient_through_state(const Chunk& chunk, int h, const Factors& factors);
  void store_keys(const Chunk& chunk);
  void reverse(const Chunk& chunk);
};

void Task::load_keys(const Chunk& chunk) {
  load_rows(p.dtype, p.key, chunk.token * p.key_token + key_head * p.key_head, p.key_token, chunk.count,
            shape.key_dim, b.key, shape.key_row);
  normalise_rows(b.key, shape.key_row, chunk.count, shape.key, 1.0f, b.inverse_key);
  transpose_block(b.key, shape.key_row, chunk.count, shape.key, b.key_columns, b.chunk_row);
  Product pairs{chunk.count, shape.key, round_up(chunk.count, kLanes), {b.key, shape.key_row, 1},
                {b.key_columns, b.chunk_row}, b.key_key, b.chunk_row};
  pairs.lower_only = true;
  product(pairs);
}

void Task::load_queries(const Chunk& chunk) {
  load_rows(p.dtype, p.query, chunk.token * p.query_token + key_head * p.query_head, p.query_token, chunk.count,
            shape.key_dim, b.query, shape.key_row);
  normalise_rows(b.query, shape.key_row, chunk.count, shape.key, shape.query_scale, b.inverse_query);
  Product pairs{chunk.count, shape.key, round_up(chunk.count, kLanes), {b.query, shape.key_row, 1},
                {b.key_columns, b.chunk_row}, b.query_key, b.chunk_row};
  pairs.lower_only = true;
  product(pairs);
}

// t into `solved`, u into b.written; the state before the chunk is in state(h).
void Task::solve_values(const Chunk& chunk, int h, const Factors& factors, float* solved) {
  load_rows(p.dtype, p.value, chunk.token * p.value_token + head(h) * p.value_head, p.value_token, chunk.count,
            shape.value_dim, solved, shape.value_row);
  if (!chunk.first) {
    Product known{chunk.count, shape.key, shape.value, {b.key, shape.key_row, 1}, {state(h), shape.value_row}, solved,
                  shape.value_row};
    known.scale = factors.minus_age;
    known.keep = 1.0f;
    product(known);
  }
  solve({chunk.count, shape.value, {b.system, b.chunk_row, 1}, factors.beta, 1, solved, b.written, shape.value_row});
}

// Saves t and the state behind the chunk.
void Task::sweep(const Chunk& chunk) {
  load_keys(chunk);
  for (int h = 0; h < shape.repeat; ++h) {
    Factors factors;
    fill_factors(p.decay + scalar(chunk, h), p.beta + scalar(chunk, h), p.value_heads, chunk.count, factors);
    fill_pairs(factors, chunk.count, b.chunk_row, b.key_key, nullptr, b.system, nullptr, nullptr);
    solve_values(chunk, h, factors, saved_solved(chunk.index, h));
    scale_rows(b.written, shape.value_row, chunk.count, shape.value, factors.rest);
    Product update{shape.key, chunk.count, shape.value, {b.key, 1, shape.key_row}, {b.written, shape.value_row},
                   state(h), shape.value_row};
    update.keep = chunk.first ? 0.0f : factors.total;
    product(update);
    transpose_block(state(h), shape.value_row, shape.key, shape.value, saved_state(chunk.index, h), shape.key_row);
  }
}

// y into b.grad_written, b into b.grad_solved; stores dv and dbeta.
void Task::gradient_of_solved(const Chunk& chunk, int h, const Factors& factors, const float* solved) {
  const int count = chunk.count;
  const int64_t row = shape.value_row;
  Product attended{count, count, shape.value, {b.attention, 1, b.chunk_row}, {b.grad_out, row}, b.grad_written, row};
  attended.range = Inner::kFromRow;
  product(attended);
  if (!chunk.last) {
    Product kept{count, shape.key, shape.value, {b.key, shape.key_row, 1}, {grad_state(h), row}, b.grad_written, row};
    kept.scale = factors.rest;
    kept.keep = 1.0f;
    product(kept);
  }
  // the transposed system, read from its last element backwards
  const int last = count - 1;
  solve({count, shape.value, {b.system + last * b.chunk_row + last, -1, -b.chunk_row}, factors.beta + last, -1,
         b.grad_written + last * row, b.grad_solved + last * row, -row});
  for (int i = 0; i < count; ++i) {
    grads.beta[scalar(chunk, h) + i * p.value_heads] =
        dot_row(b.grad_written + i * row, solved + i * row, shape.value);
  }
  store_rows(b.grad_solved, row, count, shape.value_dim, p.dtype, grads.value, scalar(chunk, h) * shape.value_dim,
             p.value_heads * shape.value_dim);
}

// Adds the decayed gradients of both triangles to their sums over the heads; dG of the pairs into b.grad_running.
void Task::gradient_of_pairs(const Chunk& chunk) {
  const int count = chunk.count, padded = round_up(count, kLanes);
  transpose_block(b.written, shape.value_row, count, shape.value, b.written_columns, b.chunk_row);
  Product pairs{count, shape.value, padded, {b.grad_out, shape.value_row, 1}, {b.written_columns, b.chunk_row},
                b.grad_attention, b.chunk_row};
  pairs.lower_only = true;
  product(pairs);
  pairs.left.data = b.grad_solved;
  pairs.out = b.grad_system;
  product(pairs);

  alignas(64) float columns[kChunk] = {};
  for (int i = 0; i < count; ++i) {
    const int64_t start = static_cast<int64_t>(i) * b.chunk_row;
    Vec row_sum = zeros();
    for (int j = 0; j <= i; j += kLanes) {
      const Mask before = tail(i - j), upto = tail(i - j + 1);
      const Vec decay = load(b.pairs + start + j);
      const Vec attention = _mm512_maskz_mul_ps(upto, decay, load(b.grad_attention + start + j));
      const Vec system = _mm512_maskz_mul_ps(before, decay, load(b.grad_system + start + j));
      store(b.sum_attention + start + j, add(load(b.sum_attention + start + j), attention));
      store(b.sum_system + start + j, sub(load(b.sum_system + start + j), system));
      Vec both = mul(attention, load(b.query_key + start + j));
      both = _mm512_maskz_mov_ps(before, fnma(system, load(b.key_key + start + j), both));
      row_sum = add(row_sum, both);
      store(columns + j, add(load(columns + j), both));
    }
    b.grad_running[i] = sum(row_sum);
  }
  for (int i = 0; i < count; ++i) b.grad_running[i] -= columns[i];
}

// Everything that passes the state before the chunk and the one behind it; leaves the gradient of the former.
void Task::gradient_through_state(const Chunk& chunk, int h, const Factors& factors) {
  const int count = chunk.count;
  const int64_t row = shape.key_row;
  const auto pass = [&](const float* left, const float* state_columns, const float* scale, const float* with,
                        float* target, float sign) {
    Product through{count, shape.value, shape.key, {left, shape.value_row, 1}, {state_columns, row}, b.from_state, row};
    through.scale = scale;
    product(through);
    float total = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float share = dot_row(with + i * row, b.from_state + i * row, shape.key);
      b.grad_running[i] += sign * share;
      total += share;
      for (int d = 0; d < shape.key; d += kLanes) {
        store(target + i * row + d, add(load(target + i * row + d), load(b.from_state + i * row + d)));
      }
    }
    return total;
  };
  if (!chunk.last) {
    transpose_block(grad_state(h), shape.value_row, shape.key, shape.value, b.grad_state_columns, row);
    const float total = pass(b.written, b.grad_state_columns, factors.rest, b.key, b.grad_key, -1.0f);
    b.grad_running[count - 1] += total;
  }
  if (chunk.first) return;
  const float* before = saved_state(chunk.index - 1, h);
  pass(b.grad_out, before, factors.age, b.query, b.grad_query, 1.0f);
  pass(b.grad_solved, before, factors.minus_age, b.key, b.grad_key, 1.0f);
  if (!chunk.last) {
    float inner = 0.0f;
    for (int d = 0; d < shape.value; ++d) {
      inner += dot_row(before + d * row, b.grad_state_columns + d * row, shape.key);
    }
    b.grad_running[count - 1] += factors.total * inner;
  }
  scale_rows(b.grad_out, shape.value_row, count, shape.value, factors.age);
  scale_rows(b.grad_solved, shape.value_row, count, shape.value, factors.minus_age);
  Product update{shape.key, count, shape.value, {b.query, 1, row}, {b.grad_out, shape.value_row}, grad_state(h),
                 shape.value_row};
  update.keep = chunk.last ? 0.0f : factors.total;
  product(update);
  update.left.data = b.key;
  update.right.data = b.grad_solved;
  update.keep = 1.0f;
  product(update);
}

void Task::reverse_head(const Chunk& chunk, int h) {
  const int count = chunk.count;
  Factors factors;
  fill_factors(p.decay + scalar(chunk, h), p.beta + scalar(chunk, h), p.value_heads, count, factors);
  fill_pairs(factors, count, b.chunk_row, b.key_key, b.query_key, b.system, b.attention, b.pairs);
  const float* solved = b.solved;
  if (chunk.last) {
    solve_values(chunk, h, factors, b.solved);
  } else {
    solved = saved_solved(chunk.index, h);
    for (int i = 0; i < count; ++i) {
      for (int d = 0; d < shape.value; d += kLanes) {
        const int64_t at = static_cast<int64_t>(i) * shape.value_row + d;
        store(b.written + at, mul(splat(factors.beta[i]), load(solved + at)));
      }
    }
  }
  load_rows(p.dtype, grads.out, scalar(chunk, h) * shape.value_dim, p.value_heads * shape.value_dim, count,
            shape.value_dim, b.grad_out, shape.value_row);
  gradient_of_solved(chunk, h, factors, solved);
  gradient_of_pairs(chunk);
  gradient_through_state(chunk, h, factors);
  float running = 0.0f;
  for (int i = count - 1; i >= 0; --i) {
    running += b.grad_running[i];
    grads.decay[scalar(chunk, h) + i * p.value_heads] = running;
  }
}

// Through the unit norm: for n = x * inverse and a gradient d of scale * n, dx = scale * inverse * (d - n (n . d)).
void unit_norm_backward(const float* unit, const float* inverse, float scale, const Shape& shape, int count,
                        float* grad) {
  const int64_t row = shape.key_row;
  for (int i = 0; i < count; ++i) {
    const float* n = unit + i * row;
    float* d = grad + i * row;
    const Vec along = splat(dot_row(n, d, shape.key) / (scale * scale));  // `unit` carries the scale
    const Vec factor = splat(scale * inverse[i]);
    for (int c = 0; c < shape.key; c += kLanes) store(d + c, mul(factor, fnma(along, load(n + c), load(d + c))));
  }
}

// The pair gradients, summed over the heads, times keys and queries; then the norms.
void Task::store_keys(const Chunk& chunk) {
  const int count = chunk.count;
  const int64_t row = shape.key_row;
  const auto add_product = [&](const float* triangle, bool transposed, const float* right, float* target) {
    const Left left = transposed ? Left{triangle, 1, b.chunk_row} : Left{triangle, b.chunk_row, 1};
    Product share{count, count, shape.key, left, {right, row}, target, row};
    share.range = transposed ? Inner::kFromRow : Inner::kUpToRow;
    share.keep = 1.0f;
    product(share);
  };
  add_product(b.sum_attention, false, b.key, b.grad_query);
  add_product(b.sum_attention, true, b.query, b.grad_key);
  add_product(b.sum_system, false, b.key, b.grad_key);
  add_product(b.sum_system, true, b.key, b.grad_key);
  unit_norm_backward(b.query, b.inverse_query, shape.query_scale, shape, count, b.grad_query);
  unit_norm_backward(b.key, b.inverse_key, 1.0f, shape, count, b.grad_key);
  const int64_t target = (chunk.token * p.key_heads + key_head) * shape.key_dim;
  store_rows(b.grad_query, row, count, shape.key_dim, p.dtype, grads.query, target, p.key_heads * shape.key_dim);
  store_rows(b.grad_key, row, count, shape.key_dim, p.dtype, grads.key, target, p.key_heads * shape.key_dim);
}

void Task::reverse(const Chunk& chunk) {
  load_keys(chunk);
  load_queries(chunk);
  const size_t bytes = static_cast<size_t>(chunk.count) * sizeof(float);
  memset(b.grad_key, 0, bytes * shape.key_row);
  memset(b.grad_query, 0, bytes * shape.key_row);
  memset(b.sum_attention, 0, bytes * b.chunk_row);
  memset(b.sum_system, 0, bytes * b.chunk_row);
  for (int h = 0; h < shape.repeat; ++h) reverse_head(chunk, h);
  store_keys(chunk);
}

void segment(const MoembGatedDelta& p, const Shape& shape, const Gradients& grads, float* workspace, int64_t index,
             int64_t key_head) {
  const int begin = p.cu_seqlens[index], length = p.cu_seqlens[index + 1] - begin;
  const int size = chunk_size(length), chunks = (length + size - 1) / size;
  Task task{p, shape, grads, key_head, Buffers(workspace, shape, size, chunks)};
  const auto chunk_at = [&](int c) {
    const int start = c * size, count = length - start < size ? length - start : size;
    return Chunk{begin + start, count, c, c == 0, c + 1 == chunks};
  };
  for (int c = 0; c + 1 < chunks; ++c) task.sweep(chunk_at(c));
  for (int c = chunks - 1; c >= 0; --c) task.reverse(chunk_at(c));
}

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

}  // namespace
}  // namespace moemb

extern "C" int moemb_cpu_gated_delta_backward(const MoembGatedDelta* inputs, const void* grad_output, void* grad_query,
                                              void* grad_key, void* grad_value, float* grad_decay, float* grad_beta) {
  using namespace moemb;
  const int status = check_arguments(*inputs);
  if (status != MOEMB_OK) return status;
  const Shape shape(*inputs);
  const Gradients grads{grad_output, grad_query, grad_key, grad_value, grad_decay, grad_beta};
  const int longest = longest_segment(*inputs);
  const int chunk = longest < kChunk ? longest : kChunk, chunks = (longest + kChunk - 1) / kChunk;
  const size_t floats = Buffers(nullptr, shape, chunk, chunks).floats;
  return run_tasks(*inputs, floats, false, scratch, [&](float* workspace, int64_t index, int64_t key_head) {
    segment(*inputs, shape, grads, workspace, index, key_head);
  });
}

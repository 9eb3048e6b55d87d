// Forward pass of the gated delta rule: one task per segment and key head walks the chunks with the states of its value
// heads in the cache.
#include "gated_delta.h"

namespace moemb {
namespace {

struct Buffers {
  float *key, *query;          // (chunk, key)
  float* key_columns;          // (key, chunk): the keys transposed
  float *key_key, *query_key;  // (chunk, chunk): their products, lower triangle
  float *system, *attention;   // (chunk, chunk)
  float *solved, *written;     // (chunk, value): t and u
  float* out;                  // (chunk, value)
  float* state;                // repeat x (key, value)
  int chunk_row;
  size_t floats;

  Buffers(float* block, const Shape& shape, int chunk) {
    Carver carver(block);
    chunk_row = padded_row(chunk);
    key = carver.take(chunk, shape.key_row);
    query = carver.take(chunk, shape.key_row);
    key_columns = carver.take(shape.key, chunk_row);
    key_key = carver.take(chunk, chunk_row);
    query_key = carver.take(chunk, chunk_row);
    system = carver.take(chunk, chunk_row);
    attention = carver.take(chunk, chunk_row);
    solved = carver.take(chunk, shape.value_row);
    written = carver.take(chunk, shape.value_row);
    out = carver.take(chunk, shape.value_row);
    state = carver.take(static_cast<size_t>(shape.repeat) * shape.key, shape.value_row);
    floats = carver.used();
  }
};

struct Chunk {
  int64_t token;  // first one
  int count;
  bool first;  // no state before it
  bool last;   // none is wanted behind it
  int silent;  // tokens whose output is not written
};

// The inputs of a forward pass by token, wherever its row is.
struct Tokens {
  const MoembGatedDelta& p;
  const MoembContinuation& how;

  int64_t row(int64_t token) const { return how.rows == nullptr ? token : how.rows[token]; }

  // The features of one head.
  void load(const void* source, int64_t token_step, int64_t head_offset, const Chunk& chunk, int dim, float* target,
            int64_t target_row) const {
    if (how.rows == nullptr) {
      const int64_t offset = chunk.token * token_step + head_offset;
      return load_rows(p.dtype, source, offset, token_step, chunk.count, dim, target, target_row);
    }
    for (int r = 0; r < chunk.count; ++r, target += target_row) {
      load_rows(p.dtype, source, how.rows[chunk.token + r] * token_step + head_offset, 0, 1, dim, target, target_row);
    }
  }

  // The scalars of one value head.
  void load(const float* source, int64_t head, const Chunk& chunk, float* target) const {
    for (int r = 0; r < chunk.count; ++r) target[r] = source[row(chunk.token + r) * p.value_heads + head];
  }

  void store_output(const float* source, int64_t source_row, int64_t head, const Chunk& chunk, int dim,
                    void* output) const {
    const int64_t step = p.value_heads * dim;
    if (how.rows == nullptr) {
      const int64_t offset = chunk.token * step + head * dim;
      return store_rows(source, source_row, chunk.count, dim, p.dtype, output, offset, step);
    }
    for (int r = chunk.silent; r < chunk.count; ++r) {
      const int64_t offset = how.rows[chunk.token + r] * step + head * dim;
      store_rows(source + r * source_row, source_row, 1, dim, p.dtype, output, offset, step);
    }
  }
};

void load_keys(const Tokens& tokens, const Shape& shape, int64_t head, const Chunk& chunk, Buffers& b) {
  const MoembGatedDelta& p = tokens.p;
  tokens.load(p.key, p.key_token, head * p.key_head, chunk, shape.key_dim, b.key, shape.key_row);
  tokens.load(p.query, p.query_token, head * p.query_head, chunk, shape.key_dim, b.query, shape.key_row);
  normalise_rows(b.key, shape.key_row, chunk.count, shape.key, 1.0f, nullptr);
  normalise_rows(b.query, shape.key_row, chunk.count, shape.key, shape.query_scale, nullptr);
  transpose_block(b.key, shape.key_row, chunk.count, shape.key, b.key_columns, b.chunk_row);
  Product pairs{chunk.count, shape.key, round_up(chunk.count, kLanes), {b.key, shape.key_row, 1},
                {b.key_columns, b.chunk_row}, b.key_key, b.chunk_row};
  pairs.lower_only = true;
  product(pairs);
  pairs.left.data = b.query;
  pairs.out = b.query_key;
  product(pairs);
}

void value_head(const Tokens& tokens, const Shape& shape, int64_t head, float* state, const Chunk& chunk, Buffers& b,
                void* output) {
  const MoembGatedDelta& p = tokens.p;
  const int count = chunk.count;
  const int64_t row = shape.value_row;
  float decay[kChunk], beta[kChunk];
  tokens.load(p.decay, head, chunk, decay);
  tokens.load(p.beta, head, chunk, beta);
  Factors factors;
  fill_factors(decay, beta, 1, count, factors);
  fill_pairs(factors, count, b.chunk_row, b.key_key, b.query_key, b.system, b.attention, nullptr);

  tokens.load(p.value, p.value_token, head * p.value_head, chunk, shape.value_dim, b.solved, row);
  Product from_state{count, shape.key, shape.value, {b.key, shape.key_row, 1}, {state, row}, b.solved, row};
  if (!chunk.first) {
    from_state.scale = factors.minus_age;
    from_state.keep = 1.0f;
    product(from_state);
    from_state.left.data = b.query;
    from_state.out = b.out;
    from_state.scale = factors.age;
    from_state.keep = 0.0f;
    product(from_state);
  }
  solve({count, shape.value, {b.system, b.chunk_row, 1}, factors.beta, 1, b.solved, b.written, row});

  Product attend{count, count, shape.value, {b.attention, b.chunk_row, 1}, {b.written, row}, b.out, row};
  attend.range = Inner::kUpToRow;
  attend.keep = chunk.first ? 0.0f : 1.0f;
  product(attend);
  tokens.store_output(b.out, row, head, chunk, shape.value_dim, output);

  if (chunk.last) return;
  scale_rows(b.written, row, count, shape.value, factors.rest);
  Product update{shape.key, count, shape.value, {b.key, 1, shape.key_row}, {b.written, row}, state, row};
  update.keep = chunk.first ? 0.0f : factors.total;  // a total of 0 leaves nothing of the old state, whatever it holds
  product(update);
}

// The states of the value heads of one key head: those given for the segment, or 0.
void begin_states(const Shape& shape, const float* given, int64_t key_head, float* state) {
  const int64_t size = static_cast<int64_t>(shape.key_dim) * shape.value_dim;
  const int64_t step = static_cast<int64_t>(shape.key) * shape.value_row;
  memset(state, 0, static_cast<size_t>(shape.repeat) * shape.key * shape.value_row * sizeof(float));
  for (int h = 0; given != nullptr && h < shape.repeat; ++h, state += step) {
    load_rows_as(given + (key_head * shape.repeat + h) * size, shape.value_dim, shape.key_dim, shape.value_dim, state,
                 shape.value_row);
  }
}

void end_states(const Shape& shape, const float* state, int64_t key_head, float* final) {
  const int64_t size = static_cast<int64_t>(shape.key_dim) * shape.value_dim;
  for (int h = 0; h < shape.repeat; ++h, state += static_cast<int64_t>(shape.key) * shape.value_row) {
    store_rows_as(state, shape.value_row, shape.key_dim, shape.value_dim, final + (key_head * shape.repeat + h) * size,
                  shape.value_dim);
  }
}

void segment(const Tokens& tokens, const Shape& shape, float* workspace, int64_t index, int64_t key_head,
             void* output) {
  const MoembGatedDelta& p = tokens.p;
  const MoembContinuation& how = tokens.how;
  const int begin = p.cu_seqlens[index], length = p.cu_seqlens[index + 1] - begin;
  const int size = chunk_size(length);
  const int64_t floats = p.value_heads * shape.key_dim * shape.value_dim;  // of one state
  const int32_t from = how.state_of == nullptr ? -1 : how.state_of[index];
  const int silent = how.rows == nullptr ? 0 : how.silent[index];
  Buffers buffers(workspace, shape, size);
  if (from >= 0 || length == 0) {
    begin_states(shape, from >= 0 ? how.initial + from * floats : nullptr, key_head, buffers.state);
  }
  for (int start = 0; start < length; start += size) {
    const int count = length - start < size ? length - start : size;
    const bool ends = start + count == length;
    const Chunk chunk{begin + start, count, start == 0 && from < 0, ends && how.final == nullptr,
                      silent > start ? silent - start : 0};
    load_keys(tokens, shape, key_head, chunk, buffers);
    for (int h = 0; h < shape.repeat; ++h) {
      float* state = buffers.state + static_cast<int64_t>(h) * shape.key * shape.value_row;
      value_head(tokens, shape, key_head * shape.repeat + h, state, chunk, buffers, output);
    }
  }
  if (how.final != nullptr) end_states(shape, buffers.state, key_head, how.final + index * floats);
}

// Whether every segment starts from a state that exists, and every token has a row.
bool consistent(const MoembGatedDelta& p, const MoembContinuation& how) {
  for (int64_t s = 0; how.state_of != nullptr && s < p.segments; ++s) {
    if (how.state_of[s] < -1 || how.state_of[s] >= how.count) return false;
  }
  for (int64_t t = 0; how.rows != nullptr && t < p.tokens; ++t) {
    if (how.rows[t] < 0 || how.rows[t] >= how.rows_in_all) return false;
  }
  for (int64_t s = 0; how.rows != nullptr && s < p.segments; ++s) {
    if (how.silent[s] < 0) return false;
  }
  return true;
}

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

}  // namespace
}  // namespace moemb

extern "C" int moemb_cpu_gated_delta(const MoembGatedDelta* inputs, const MoembContinuation* how, void* output) {
  using namespace moemb;
  const MoembContinuation given = how == nullptr ? MoembContinuation{} : *how;
  const int status = check_arguments(*inputs);
  if (status != MOEMB_OK) return status;
  if (!consistent(*inputs, given)) return MOEMB_BAD_ARGUMENT;
  const Shape shape(*inputs);
  const int longest = longest_segment(*inputs);
  const size_t floats = Buffers(nullptr, shape, longest < kChunk ? longest : kChunk).floats;
  const Tokens tokens{*inputs, given};
  const bool empty_too = given.final != nullptr;
  return run_tasks(*inputs, floats, empty_too, scratch, [&](float* workspace, int64_t index, int64_t key_head) {
    segment(tokens, shape, workspace, index, key_head, output);
  });
}

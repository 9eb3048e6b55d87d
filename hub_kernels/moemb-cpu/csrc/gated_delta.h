// What the forward and the backward pass of the gated delta rule share: checks, cutting into chunks, loading, and the
// factors of a chunk.
//
// A chunk of c tokens, with G the running sum of its log decays, S the state (key_dim x value_dim) before it and k, q
// the unit keys and scaled unit queries, obeys (the chunked form of Gated DeltaNet, arXiv 2412.06464, section 3.3,
// with the state kept out of the triangular system):
//   t_i = v_i - exp(G_i) S^T k_i - sum_{j<i} exp(G_i - G_j) (k_i k_j) u_j,   u_i = beta_i t_i
//   o_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i k_j) u_j
//   S  <- exp(G_c) S + sum_j exp(G_c - G_j) k_j u_j^T
#pragma once

#include <stdlib.h>

#include "gated_delta_products.h"
#include "moemb_cpu.h"

namespace moemb {
namespace {

constexpr int kChunk = 64;

inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

// A row length with an odd number of cache lines: rows of 2^n lines would all fall into the same few cache sets.
inline int padded_row(int columns) {
  const int vectors = (columns + kLanes - 1) / kLanes;
  return (vectors | 1) * kLanes;
}

// Sizes that every task needs; dimensions are rounded up to whole vectors, the padding is zero everywhere.
struct Shape {
  int repeat;              // value heads per key head
  int key_dim, value_dim;  // as given
  int key, value;          // multiples of 16
  int key_row, value_row;  // distance of rows in the workspace
  float query_scale;

  explicit Shape(const MoembGatedDelta& p)
      : repeat(static_cast<int>(p.value_heads / p.key_heads)),
        key_dim(static_cast<int>(p.key_dim)),
        value_dim(static_cast<int>(p.value_dim)),
        key(round_up(key_dim, kLanes)),
        value(round_up(value_dim, kLanes)),
        key_row(padded_row(key)),
        value_row(padded_row(value)),
        query_scale(1.0f / __builtin_sqrtf(static_cast<float>(key_dim))) {}
};

// Tokens per chunk of a segment. Chunks end at multiples of kChunk whatever the length: a segment that is cut there and
// continued from the state gives the bits of the whole.
inline int chunk_size(int length) { return length < kChunk ? length : kChunk; }

// Memory of one thread, kept from call to call: fresh pages cost more than the arithmetic on them.
class Scratch {
 public:
  ~Scratch() { free(data_); }

  // At least `count` floats, aligned to a cache line; null when there is no memory.
  float* reserve(size_t count) {
    if (count > capacity_) {
      release();
      if (posix_memalign(reinterpret_cast<void**>(&data_), 64, count * sizeof(float)) != 0) data_ = nullptr;
      capacity_ = data_ == nullptr ? 0 : count;
    }
    return data_;
  }

  // Give very large blocks back: one long segment must not keep its memory for the life of the process.
  void trim() {
    if (capacity_ > (16u << 20)) release();
  }

 private:
  void release() {
    free(data_);
    data_ = nullptr;
    capacity_ = 0;
  }

  float* data_ = nullptr;
  size_t capacity_ = 0;
};

// Hands out consecutive pieces of a block; with a null block it only counts.
class Carver {
 public:
  explicit Carver(float* block) : block_(block) {}
  float* take(size_t rows, size_t row) {
    float* piece = block_ == nullptr ? nullptr : block_ + used_;
    used_ += (rows * row + kLanes - 1) / kLanes * kLanes;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  float* block_;
  size_t used_ = 0;
};

// ---- loading and storing rows -------------------------------------------------------------------------------------

template <typename T>
void load_rows_as(const T* source, int64_t source_row, int rows, int dim, float* target, int64_t target_row) {
  for (int r = 0; r < rows; ++r, source += source_row, target += target_row) {
    for (int d = 0; d < dim; d += kLanes) store(target + d, load(source + d, tail(dim - d)));
  }
}

template <typename T>
void store_rows_as(const float* source, int64_t source_row, int rows, int dim, T* target, int64_t target_row) {
  for (int r = 0; r < rows; ++r, source += source_row, target += target_row) {
    for (int d = 0; d < dim; d += kLanes) store(target + d, load(source + d), tail(dim - d));
  }
}

// Rows of dtype `dtype` at element `offset` of `source`, widened; zeros up to a whole vector.
inline void load_rows(int dtype, const void* source, int64_t offset, int64_t source_row, int rows, int dim,
                      float* target, int64_t target_row) {
  switch (dtype) {
    case MOEMB_FP32:
      return load_rows_as(static_cast<const float*>(source) + offset, source_row, rows, dim, target, target_row);
    case MOEMB_BF16:
      return load_rows_as(static_cast<const Bf16*>(source) + offset, source_row, rows, dim, target, target_row);
    default:
      return load_rows_as(static_cast<const Fp16*>(source) + offset, source_row, rows, dim, target, target_row);
  }
}

inline void store_rows(const float* source, int64_t source_row, int rows, int dim, int dtype, void* target,
                       int64_t offset, int64_t target_row) {
  switch (dtype) {
    case MOEMB_FP32:
      return store_rows_as(source, source_row, rows, dim, static_cast<float*>(target) + offset, target_row);
    case MOEMB_BF16:
      return store_rows_as(source, source_row, rows, dim, static_cast<Bf16*>(target) + offset, target_row);
    default:
      return store_rows_as(source, source_row, rows, dim, static_cast<Fp16*>(target) + offset, target_row);
  }
}

// rows *= scale / sqrt(sum of squares + 1e-6); `inverse`, when not null, receives the factors without `scale`.
inline void normalise_rows(float* rows, int64_t row, int count, int columns, float scale, float* inverse) {
  for (int r = 0; r < count; ++r, rows += row) {
    Vec squares = zeros();
    for (int d = 0; d < columns; d += kLanes) squares = fma(load(rows + d), load(rows + d), squares);
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
    if (inverse != nullptr) inverse[r] = factor;
    const Vec scaled = splat(factor * scale);
    for (int d = 0; d < columns; d += kLanes) store(rows + d, mul(load(rows + d), scaled));
  }
}

// row r *= factors[r]
inline void scale_rows(float* rows, int64_t row, int count, int columns, const float* factors) {
  for (int r = 0; r < count; ++r, rows += row) {
    const Vec factor = splat(factors[r]);
    for (int d = 0; d < columns; d += kLanes) store(rows + d, mul(load(rows + d), factor));
  }
}

inline float dot_row(const float* a, const float* b, int columns) {
  Vec products = zeros();
  for (int d = 0; d < columns; d += kLanes) products = fma(load(a + d), load(b + d), products);
  return sum(products);
}

// ---- factors of one chunk and value head --------------------------------------------------------------------------

struct alignas(64) Factors {
  // G in two parts: multiples of 1/128 are exact for every sum that can occur, so differences of neighbours are
  // exact to 1e-9 even behind a token with decay -1000; in one float they would be off by 1e-4
  float coarse[kChunk], fine[kChunk];
  float age[kChunk];        // exp(G_i)
  float minus_age[kChunk];  // -exp(G_i)
  float rest[kChunk];       // exp(G_c - G_i)
  float beta[kChunk];
  float total;  // exp(G_c)
};

// exp(-1000) is 0 in fp32; without the bound the sum would run out of exact bits.
constexpr float kStrongestDecay = -1000.0f;

inline void fill_factors(const float* decay, const float* beta, int64_t stride, int count, Factors& f) {
  double running = 0.0;
  double sums[kChunk];
  for (int i = 0; i < count; ++i) {
    const float step = decay[i * stride];
    running += step < kStrongestDecay ? kStrongestDecay : step;  // NaN passes
    sums[i] = running;
    const double coarse = __builtin_rint(running * 128.0) / 128.0;
    f.coarse[i] = static_cast<float>(coarse);
    f.fine[i] = static_cast<float>(running - coarse);
    f.age[i] = static_cast<float>(running);
    f.beta[i] = beta[i * stride];
  }
  for (int i = 0; i < count; ++i) f.rest[i] = static_cast<float>(running - sums[i]);
  const int padded = round_up(count, kLanes);
  for (int i = count; i < padded; ++i) f.coarse[i] = f.fine[i] = f.age[i] = f.rest[i] = f.beta[i] = 0.0f;
  for (int i = 0; i < padded; i += kLanes) {
    const Vec age = exp(load(f.age + i));
    store(f.age + i, age);
    store(f.minus_age + i, sub(zeros(), age));
    store(f.rest + i, exp(load(f.rest + i)));
  }
  f.total = f.age[count - 1];
}

// exp(G_i - G_j) for 16 consecutive j
inline Vec pair_decay(const Factors& f, int i, int j) {
  const Vec coarse = sub(splat(f.coarse[i]), load(f.coarse + j));
  return exp(add(coarse, sub(splat(f.fine[i]), load(f.fine + j))));
}

// system = pair decay * keys, strictly lower; attention = pair decay * queries, lower; zeros elsewhere. `pairs`
// receives the pair decay (lower) when not null; `queries` may be null.
inline void fill_pairs(const Factors& f, int count, int row, const float* keys, const float* queries, float* system,
                       float* attention, float* pairs) {
  const int padded = round_up(count, kLanes);
  for (int i = 0; i < count; ++i) {
    const int64_t start = static_cast<int64_t>(i) * row;
    int j = 0;
    for (; j <= i; j += kLanes) {
      const Mask before = tail(i - j), upto = tail(i - j + 1);
      const Vec decay = _mm512_maskz_mov_ps(upto, pair_decay(f, i, j));
      store(system + start + j, _mm512_maskz_mul_ps(before, decay, load(keys + start + j)));
      if (queries != nullptr) {
        store(attention + start + j, _mm512_maskz_mul_ps(upto, decay, load(queries + start + j)));
      }
      if (pairs != nullptr) store(pairs + start + j, decay);
    }
    for (; j < padded; j += kLanes) {
      store(system + start + j, zeros());
      if (queries != nullptr) store(attention + start + j, zeros());
    }
  }
}

// ---- tasks --------------------------------------------------------------------------------------------------------

inline int check_arguments(const MoembGatedDelta& p) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512) return MOEMB_UNSUPPORTED;
  if (p.dtype != MOEMB_FP32 && p.dtype != MOEMB_BF16 && p.dtype != MOEMB_FP16) return MOEMB_UNSUPPORTED;
  if (p.key_heads < 1 || p.value_heads < p.key_heads || p.value_heads % p.key_heads) return MOEMB_BAD_ARGUMENT;
  if (p.key_dim < 1 || p.value_dim < 1 || p.key_dim > 1024 || p.value_dim > 1024) return MOEMB_UNSUPPORTED;
  if (p.segments < 0 || p.cu_seqlens[0] != 0 || p.cu_seqlens[p.segments] != p.tokens) return MOEMB_BAD_ARGUMENT;
  for (int64_t s = 0; s < p.segments; ++s) {
    if (p.cu_seqlens[s + 1] < p.cu_seqlens[s]) return MOEMB_BAD_ARGUMENT;
  }
  return MOEMB_OK;
}

// Whether the work is worth waking threads, about 20 microseconds of it.
inline bool worth_threads(const MoembGatedDelta& p) {
  return p.segments * p.key_heads > 1 && p.tokens * p.value_heads * (p.key_dim + p.value_dim) > 20000;
}

inline int longest_segment(const MoembGatedDelta& p) {
  int longest = 0;
  for (int64_t s = 0; s < p.segments; ++s) {
    const int length = p.cu_seqlens[s + 1] - p.cu_seqlens[s];
    if (length > longest) longest = length;
  }
  return longest;
}

struct Ordered {
  int32_t length, segment;
};

inline int longer_first(const void* a, const void* b) {
  const Ordered &x = *static_cast<const Ordered*>(a), &y = *static_cast<const Ordered*>(b);
  return x.length != y.length ? (x.length > y.length ? -1 : 1) : (x.segment < y.segment ? -1 : 1);
}

// The segments, longest first, so that no thread begins a long one when the others end; null without memory.
inline Ordered* order_segments(const MoembGatedDelta& p) {
  Ordered* order = static_cast<Ordered*>(malloc(static_cast<size_t>(p.segments + 1) * sizeof(Ordered)));
  if (order == nullptr) return nullptr;
  for (int64_t s = 0; s < p.segments; ++s) {
    order[s] = {p.cu_seqlens[s + 1] - p.cu_seqlens[s], static_cast<int32_t>(s)};
  }
  qsort(order, static_cast<size_t>(p.segments), sizeof(Ordered), longer_first);
  return order;
}

// Runs `task(workspace, segment, key_head)` for all of them, or for those with tokens, on all threads. `floats` of
// workspace per thread.
template <typename Task>
int run_tasks(const MoembGatedDelta& p, size_t floats, bool empty_too, Scratch& (*scratch)(), const Task& task) {
  Ordered* order = order_segments(p);
  if (order == nullptr) return MOEMB_NO_MEMORY;
  const int64_t tasks = p.segments * p.key_heads;
  int failed = 0;
#pragma omp parallel if (worth_threads(p))
  {
    FlushSubnormals flush;
    float* workspace = scratch().reserve(floats);
    if (workspace == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t t = 0; t < tasks; ++t) {
      const Ordered& segment = order[t / p.key_heads];
      if (workspace != nullptr && (segment.length > 0 || empty_too)) task(workspace, segment.segment, t % p.key_heads);
    }
    scratch().trim();
  }
  free(order);
  return failed ? MOEMB_NO_MEMORY : MOEMB_OK;
}

}  // namespace
}  // namespace moemb

// What the row-wise kernels and attention need beyond simd.h: cheaper exponentials, scratch memory, row views.
#pragma once

#include <stdlib.h>

#include "moemb_cpu.h"
#include "simd.h"

namespace moemb {
namespace {

// Under this many elements a parallel region costs more than it saves (about 20 microseconds of work).
constexpr int64_t kSerialElements = 1 << 16;

inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline int64_t round_up(int64_t count, int64_t size) { return ceil_div(count, size) * size; }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// 2^x for the probabilities of attention: relative error 1e-7 and no rounding of x. -inf gives 0, NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec bounded = _mm512_max_ps(splat(-160.0f), x);  // the second operand when one is NaN
  const Vec power = _mm512_roundscale_ps(bounded, kNearest);
  const Vec rest = sub(bounded, power);
  // fitted for the least relative error (9e-8) on |rest| <= 0.5
  Vec value = splat(1.326472389e-03f);
  value = fma(value, rest, splat(9.671512870e-03f));
  value = fma(value, rest, splat(5.550733754e-02f));
  value = fma(value, rest, splat(2.402224208e-01f));
  value = fma(value, rest, splat(6.931469776e-01f));
  value = fma(value, rest, splat(1.0f));
  return _mm512_scalef_ps(value, power);
}

// sigmoid() without the division, which would take a third of the time of a whole gated norm. The divisor stays
// finite, so the two Newton terms on the 14-bit reciprocal cannot make a NaN; below -80 the result is 0 (it is 2e-35).
inline Vec quick_sigmoid(Vec x) {
  const Vec one = splat(1.0f);
  const Vec divisor = add(one, exp(sub(zeros(), _mm512_max_ps(splat(-80.0f), x))));
  const Vec guess = _mm512_rcp14_ps(divisor);
  const Vec error = fnma(divisor, guess, one);
  const Mask vanishing = _mm512_cmp_ps_mask(x, splat(-80.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(fma(guess, fma(error, error, error), guess), vanishing, zeros());
}

// sigmoid * (1 + x * (1 - sigmoid)), the derivative of silu
inline Vec silu_slope(Vec x, Vec open) {
  const Vec one = splat(1.0f);
  return mul(open, fma(x, sub(one, open), one));
}

// Memory that grows on demand and is reused by its thread; 64-byte aligned.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(memory_); }

  // Null when memory runs out. The contents are whatever the last use left.
  float* floats(int64_t count) {
    if (count > size_) {
      free(memory_);
      size_ = round_up(count + count / 4, kLanes);
      memory_ = static_cast<float*>(aligned_alloc(64, size_ * sizeof(float)));
      if (memory_ == nullptr) size_ = 0;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  int64_t size_ = 0;
};

// Row `index` of a two-level view.
template <typename T>
inline const T* row_at(const MoembRows& rows, int64_t index) {
  if (rows.inner == 1) return static_cast<const T*>(rows.data) + index * rows.outer_stride;
  const int64_t outer = index / rows.inner, inner = index - outer * rows.inner;
  return static_cast<const T*>(rows.data) + outer * rows.outer_stride + inner * rows.inner_stride;
}

}  // namespace
}  // namespace moemb

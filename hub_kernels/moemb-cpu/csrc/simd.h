// AVX-512 helpers shared by the kernels: 16 fp32 lanes, whatever the element type in memory.
//
// Include it only from files compiled with the flags of the avx512 component (or more). Everything here lives in an
// anonymous namespace: two files compiled with different flags must not share one copy of an inline function, or the
// linker may keep the one that needs instructions the CPU lacks. For the same reason such files use no templates of the
// standard library on public types.
//
//   Vec x = load(row + d);              // float*, Bf16* or Fp16*; 16 elements
//   Vec y = load(row + d, tail(n));     // the first n elements, zeros behind; nothing else is read
//   store(out + d, x), store(out + d, x, tail(n));
//   exp(x), sigmoid(x), silu(x), sum(x), maximum(x)
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace moemb {
namespace {

using Vec = __m512;
using Mask = __mmask16;

constexpr int kLanes = 16;

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

// ---- lanes --------------------------------------------------------------------------------------------------------

// The first `count` lanes; none for count <= 0, all for count >= 16.
inline Mask tail(int64_t count) {
  if (count >= kLanes) return 0xFFFF;
  return count <= 0 ? 0 : static_cast<Mask>((1u << count) - 1);
}

inline Vec zeros() { return _mm512_setzero_ps(); }

inline Vec splat(float value) { return _mm512_set1_ps(value); }

// ---- memory -------------------------------------------------------------------------------------------------------

inline Vec widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Round to nearest even; NaN stays NaN (a quiet one).
inline __m256i narrow_bf16(Vec value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const Mask nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

inline Vec load(const float* source) { return _mm512_loadu_ps(source); }
inline Vec load(const float* source, Mask mask) { return _mm512_maskz_loadu_ps(mask, source); }
inline Vec load(const Bf16* source) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline Vec load(const Bf16* source, Mask mask) { return widen_bf16(_mm256_maskz_loadu_epi16(mask, source)); }
inline Vec load(const Fp16* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline Vec load(const Fp16* source, Mask mask) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, source)); }

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline void store(float* target, Vec value) { _mm512_storeu_ps(target, value); }
inline void store(float* target, Vec value, Mask mask) { _mm512_mask_storeu_ps(target, mask, value); }
inline void store(Bf16* target, Vec value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow_bf16(value));
}
inline void store(Bf16* target, Vec value, Mask mask) { _mm256_mask_storeu_epi16(target, mask, narrow_bf16(value)); }
inline void store(Fp16* target, Vec value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(value, kNearest));
}
inline void store(Fp16* target, Vec value, Mask mask) {
  _mm256_mask_storeu_epi16(target, mask, _mm512_cvtps_ph(value, kNearest));
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b

// Sum of the lanes, always in the same order.
inline float sum(Vec value) { return _mm512_reduce_add_ps(value); }

// Largest lane; unspecified when a lane is NaN.
inline float maximum(Vec value) { return _mm512_reduce_max_ps(value); }

// e^x to 1e-7 relative. NaN stays NaN, inf gives inf; results below the smallest normal number become 0, so that a
// strong decay does not slow the products down with subnormal operands.
inline Vec exp(Vec x) {
  // the bound comes first: min and max return their second operand when one is NaN
  const Vec bounded = _mm512_max_ps(splat(-104.0f), _mm512_min_ps(splat(89.0f), x));
  const Vec n = _mm512_roundscale_ps(mul(bounded, splat(1.44269504088896341f)), kNearest);
  // x - n log(2) in two steps: the first constant has 9 spare bits, so its product is exact
  const Vec r = fnma(n, splat(-2.12194440e-4f), fnma(n, splat(0.693359375f), bounded));
  // 1 + r + r^2 P(r), P fitted for the least relative error (3e-9) on |r| <= log(2) / 2
  Vec p = fma(splat(0.0013814583653584123f), r, splat(0.008368724025785923f));
  p = fma(p, r, splat(0.04166838899254799f));
  p = fma(p, r, splat(0.1666652113199234f));
  p = fma(p, r, splat(0.4999999403953552f));
  p = fma(mul(r, r), p, add(r, splat(1.0f)));
  const Mask subnormal = _mm512_cmp_ps_mask(x, splat(-87.33654f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), subnormal, zeros());
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zeros(), x)))); }

// x / (1 + e^-x)
inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exp(sub(zeros(), x)))); }

// Transpose a 16 x 16 tile held in registers.
inline void transpose(Vec rows[kLanes]) {
  Vec pairs[kLanes], quads[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const __m512d a = _mm512_castps_pd(pairs[i]), b = _mm512_castps_pd(pairs[i + 1]);
    const __m512d c = _mm512_castps_pd(pairs[i + 2]), d = _mm512_castps_pd(pairs[i + 3]);
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    // quads[4 g + i] holds, in its lane group l, column 4 l + i of the rows 4 g .. 4 g + 3
    const Vec low = _mm512_shuffle_f32x4(quads[i], quads[4 + i], 0x88);
    const Vec high = _mm512_shuffle_f32x4(quads[i], quads[4 + i], 0xDD);
    const Vec low2 = _mm512_shuffle_f32x4(quads[8 + i], quads[12 + i], 0x88);
    const Vec high2 = _mm512_shuffle_f32x4(quads[8 + i], quads[12 + i], 0xDD);
    rows[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[8 + i] = _mm512_shuffle_f32x4(low, low2, 0xDD);
    rows[4 + i] = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(high, high2, 0xDD);
  }
}

// While it lives, subnormal operands and results of this thread count as 0: they cost a hundred times a product.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned saved_;
};

}  // namespace
}  // namespace moemb

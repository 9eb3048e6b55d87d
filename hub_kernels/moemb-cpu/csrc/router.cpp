// Router: the k largest logits of each token and their renormalised softmax, forward and backward.
//
// softmax over all experts followed by renormalisation over the chosen ones is softmax over the chosen ones: only k
// exponentials are computed, and a chosen probability cannot underflow before it is renormalised.
#include <math.h>

#include "rows_simd.h"

namespace moemb {
namespace {

constexpr int64_t kMaxExperts = 4096;
constexpr int32_t kNanKey = INT32_MAX;
constexpr int32_t kTaken = INT32_MIN;

// Integers in the order of the floats; NaN (either sign) largest, -0 equal to 0.
inline __m512i ordered_keys(Vec logits) {
  const __m512i bits = _mm512_castps_si512(add(logits, zeros()));
  const __m512i flip = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff));
  const Mask nan = _mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q);
  return _mm512_mask_set1_epi32(_mm512_xor_si512(bits, flip), nan, kNanKey);
}

// Index of the largest key, the lowest one among equals; the key is then marked as taken.
inline int64_t take_largest(int32_t* keys, int64_t vectors) {
  __m512i best[2] = {_mm512_load_si512(keys), _mm512_set1_epi32(kTaken)};
  for (int64_t vector = 1; vector < vectors; ++vector) {
    best[vector & 1] = _mm512_max_epi32(best[vector & 1], _mm512_load_si512(keys + vector * kLanes));
  }
  const __m512i largest = _mm512_set1_epi32(_mm512_reduce_max_epi32(_mm512_max_epi32(best[0], best[1])));
  for (int64_t vector = 0; vector < vectors; ++vector) {
    const Mask equal = _mm512_cmpeq_epi32_mask(_mm512_load_si512(keys + vector * kLanes), largest);
    if (equal) {
      const int64_t index = vector * kLanes + __builtin_ctz(equal);
      keys[index] = kTaken;
      return index;
    }
  }
  return 0;
}

void route_token(const float* logits, int64_t num_experts, int64_t k, int64_t* expert_index, float* weight) {
  alignas(64) int32_t keys[kMaxExperts];
  const int64_t vectors = ceil_div(num_experts, kLanes);
  for (int64_t vector = 0; vector < vectors; ++vector) {
    const Mask lanes = tail(num_experts - vector * kLanes);
    const __m512i found = ordered_keys(load(logits + vector * kLanes, lanes));
    _mm512_store_si512(keys + vector * kLanes, _mm512_mask_mov_epi32(_mm512_set1_epi32(kTaken), lanes, found));
  }
  for (int64_t slot = 0; slot < k; ++slot) expert_index[slot] = take_largest(keys, vectors);
  // a NaN is among the chosen (it counts as largest), so it reaches every weight through the sum, as in softmax
  const Vec largest = splat(logits[expert_index[0]]);
  float total = 0.0f;
  for (int64_t slot = 0; slot < k; slot += kLanes) {
    const Mask lanes = tail(k - slot);
    alignas(64) float chosen[kLanes] = {};
    for (int64_t lane = 0; lane < kLanes && slot + lane < k; ++lane) {
      chosen[lane] = logits[expert_index[slot + lane]];
    }
    const Vec value = _mm512_maskz_mov_ps(lanes, exp(sub(_mm512_load_ps(chosen), largest)));
    total += sum(value);
    store(weight + slot, value, lanes);
  }
  for (int64_t slot = 0; slot < k; ++slot) weight[slot] /= total;
}

}  // namespace
}  // namespace moemb

using namespace moemb;

extern "C" {

int moemb_cpu_top_k_router(const float* logits, int64_t row_stride, int64_t tokens, int64_t num_experts, int64_t k,
                           int64_t* expert_index, float* weight) {
#pragma omp parallel for schedule(static) if (tokens * num_experts > kSerialElements)
  for (int64_t token = 0; token < tokens; ++token) {
    route_token(logits + token * row_stride, num_experts, k, expert_index + token * k, weight + token * k);
  }
  return MOEMB_OK;
}

int moemb_cpu_top_k_router_backward(const int64_t* expert_index, const float* weight, const float* grad_weight,
                                    int64_t tokens, int64_t num_experts, int64_t k, float* grad_logits) {
#pragma omp parallel for schedule(static) if (tokens * num_experts > kSerialElements)
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t* experts = expert_index + token * k;
    const float *weights = weight + token * k, *grads = grad_weight + token * k;
    float* target = grad_logits + token * num_experts;
    memset(target, 0, num_experts * sizeof(float));
    float mean = 0.0f;
    for (int64_t slot = 0; slot < k; ++slot) mean += weights[slot] * grads[slot];
    for (int64_t slot = 0; slot < k; ++slot) target[experts[slot]] = weights[slot] * (grads[slot] - mean);
  }
  return MOEMB_OK;
}

}  // extern "C"

// Depthwise causal convolution over packed segments, forward and backward. The tokens are cut into fixed blocks; a
// block takes its channels strip by strip, each so narrow that the rows in use stay in the first cache and so wide that
// they are read in long runs.
#include <stdlib.h>

#include "moemb_cpu.h"
#include "simd.h"

namespace moemb {
namespace {

constexpr int64_t kBlock = 256;  // tokens; grad_weight is summed in these blocks, so it must not depend on the threads
constexpr int64_t kForwardStrip = 2048, kBackwardStrip = 1024;  // channels
constexpr int kMaxTaps = 8;

template <int kCount>
struct Taps {
  static constexpr int value = kCount;
};

// The tokens [begin, end) of one block that belong to the segment [start, stop).
struct Piece {
  int64_t begin, end, start, stop;
};

// Calls `visit(piece)` for each segment that has tokens in block `index`.
template <typename Visit>
inline void for_pieces(const MoembCausalConv& p, int64_t index, const Visit& visit) {
  const int64_t first = index * kBlock, last = first + kBlock < p.tokens ? first + kBlock : p.tokens;
  int64_t low = 0, high = p.segments;  // the last segment that starts at or before `first`
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.cu_seqlens[middle] <= first ? low : high) = middle;
  }
  for (int64_t s = low; s < p.segments && p.cu_seqlens[s] < last; ++s) {
    const int64_t start = p.cu_seqlens[s], stop = p.cu_seqlens[s + 1];
    const Piece piece{start > first ? start : first, stop < last ? stop : last, start, stop};
    if (piece.begin < piece.end) visit(piece);
  }
}

// ---- one token, one strip of channels -----------------------------------------------------------------------------
// kTaps is the number of taps that find a token: fewer than there are at the start of a segment. Tokens that do not
// exist are left out, not multiplied by 0: an item that holds NaN must not reach its neighbours. `weights` and
// `grad_weights` point at the oldest of these taps, `input` at the newest token.

template <typename T, int kTaps>
inline Vec weighted_sum(const T* input, int64_t token, const float* weights, int64_t weight_row, int64_t c, Mask mask) {
  Vec total = mul(load(weights + (kTaps - 1) * weight_row + c), load(input + c, mask));
#pragma GCC unroll 8
  for (int back = 1; back < kTaps; ++back) {
    total = fma(load(weights + (kTaps - 1 - back) * weight_row + c), load(input - back * token + c, mask), total);
  }
  return total;
}

template <typename T, int kTaps>
void output_row(const MoembCausalConv& p, const T* input, const float* weights, int64_t weight_row, int64_t count,
                T* output) {
  const int64_t token = p.token;
  const bool activated = p.silu != 0;
  for (int64_t c = 0; c < count; c += kLanes) {
    const Mask mask = tail(count - c);
    const Vec total = weighted_sum<T, kTaps>(input, token, weights, weight_row, c, mask);
    store(output + c, activated ? silu(total) : total, mask);
  }
}

// The derivative of x * sigmoid(x).
inline Vec silu_slope(Vec x) {
  const Vec gate = sigmoid(x);
  return mul(gate, fma(x, sub(splat(1.0f), gate), splat(1.0f)));
}

// grads = gradient of the sum before the activation. Adds to grad_weights when not null.
template <typename T, int kTaps>
void sum_gradient_row(const MoembCausalConv& p, const T* input, const float* weights, int64_t weight_row,
                      int64_t count, const T* grad_output, float* grads, float* grad_weights) {
  const int64_t token = p.token;
  const bool activated = p.silu != 0;
  for (int64_t c = 0; c < count; c += kLanes) {
    const Mask mask = tail(count - c);
    Vec grad = load(grad_output + c, mask);
    if (activated) grad = mul(grad, silu_slope(weighted_sum<T, kTaps>(input, token, weights, weight_row, c, mask)));
    store(grads + c, grad);
    if (grad_weights == nullptr) continue;
#pragma GCC unroll 8
    for (int back = 0; back < kTaps; ++back) {
      float* sums = grad_weights + (kTaps - 1 - back) * weight_row + c;
      store(sums, fma(grad, load(input - back * token + c, mask), load(sums)));
    }
  }
}

// Gradient of the input of one token: grads[i] is the row of the token i later, weights[-i] its tap.
template <typename T, int kTaps>
void input_gradient_row(const float* const grads[], const float* newest_weights, int64_t weight_row, int64_t count,
                        T* grad_input) {
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec total = mul(load(newest_weights + c), load(grads[0] + c));
#pragma GCC unroll 8
    for (int ahead = 1; ahead < kTaps; ++ahead) {
      total = fma(load(newest_weights - ahead * weight_row + c), load(grads[ahead] + c), total);
    }
    store(grad_input + c, total, tail(count - c));
  }
}

// Calls function(Taps<count>()); 1 <= count <= kMaxTaps.
template <int kTaps = kMaxTaps, typename Function>
inline void with_taps(int64_t count, const Function& function) {
  if (count == kTaps) {
    function(Taps<kTaps>());
  } else if constexpr (kTaps > 1) {
    with_taps<kTaps - 1>(count, function);
  }
}

// ---- one block of tokens ------------------------------------------------------------------------------------------

struct Plan {
  const float* weights;  // (taps, weight_row)
  int64_t weight_row;
  const void* grad_output;
  void* output;         // or grad_hidden
  float* grad_weights;  // (blocks, taps, weight_row)
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
void forward_block(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  for (int64_t channel = 0; channel < p.channels; channel += kForwardStrip) {
    const int64_t count = smaller(kForwardStrip, p.channels - channel);
    for_pieces(p, index, [&](const Piece& piece) {
      for (int64_t t = piece.begin; t < piece.end; ++t) {
        const int64_t present = smaller(p.taps, t - piece.start + 1);
        const T* input = static_cast<const T*>(p.hidden_states) + t * p.token + channel;
        T* output = static_cast<T*>(plan.output) + t * p.channels + channel;
        const float* weights = plan.weights + (p.taps - present) * plan.weight_row + channel;
        with_taps(present, [&](auto taps) {
          output_row<T, decltype(taps)::value>(p, input, weights, plan.weight_row, count, output);
        });
      }
    });
  }
}

// Gradients of the sums pass through a ring of rows: token t's input waits for those of t .. t + taps - 1.
template <typename T>
void backward_piece(const MoembCausalConv& p, const Plan& plan, const Piece& piece, int64_t channel,
                    float* grad_weights) {
  alignas(64) float ring[kMaxTaps][kBackwardStrip];
  const int64_t count = smaller(kBackwardStrip, p.channels - channel), row = plan.weight_row;
  const auto finish_input = [&](int64_t t) {
    const int64_t present = smaller(p.taps, piece.stop - t);
    const float* grads[kMaxTaps];
    for (int64_t i = 0; i < present; ++i) grads[i] = ring[(t + i) % kMaxTaps];
    T* grad_input = static_cast<T*>(plan.output) + t * p.channels + channel;
    const float* newest = plan.weights + (p.taps - 1) * row + channel;
    with_taps(present, [&](auto taps) {
      input_gradient_row<T, decltype(taps)::value>(grads, newest, row, count, grad_input);
    });
  };
  // the tokens behind the block complete its last inputs; their share of grad_weight is their own block's
  const int64_t stop = smaller(piece.end + p.taps - 1, piece.stop);
  int64_t unfinished = piece.begin;
  for (int64_t t = piece.begin; t < stop; ++t) {
    const int64_t present = smaller(p.taps, t - piece.start + 1), skipped = (p.taps - present) * row;
    const T* input = static_cast<const T*>(p.hidden_states) + t * p.token + channel;
    const T* grad_output = static_cast<const T*>(plan.grad_output) + t * p.channels + channel;
    float* sums = t < piece.end ? grad_weights + skipped : nullptr;
    with_taps(present, [&](auto taps) {
      sum_gradient_row<T, decltype(taps)::value>(p, input, plan.weights + skipped + channel, row, count, grad_output,
                                                 ring[t % kMaxTaps], sums);
    });
    if (t - unfinished == p.taps - 1) finish_input(unfinished++);
  }
  while (unfinished < piece.end) finish_input(unfinished++);
}

template <typename T>
void backward_block(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  for (int64_t channel = 0; channel < p.channels; channel += kBackwardStrip) {
    float* sums = plan.grad_weights + index * p.taps * plan.weight_row + channel;
    const size_t bytes = sizeof(float) * static_cast<size_t>(smaller(kBackwardStrip, plan.weight_row - channel));
    for (int64_t i = 0; i < p.taps; ++i) memset(sums + i * plan.weight_row, 0, bytes);
    for_pieces(p, index, [&](const Piece& piece) { backward_piece<T>(p, plan, piece, channel, sums); });
  }
}

template <typename T>
void block_of(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  plan.grad_output == nullptr ? forward_block<T>(p, plan, index) : backward_block<T>(p, plan, index);
}

void run_blocks(const MoembCausalConv& p, const Plan& plan) {
  const int64_t blocks = (p.tokens + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) if (blocks > 1 && p.tokens * p.channels > 100000)
  for (int64_t index = 0; index < blocks; ++index) {
    FlushSubnormals flush;
    if (p.dtype == MOEMB_FP32) {
      block_of<float>(p, plan, index);
    } else if (p.dtype == MOEMB_BF16) {
      block_of<Bf16>(p, plan, index);
    } else {
      block_of<Fp16>(p, plan, index);
    }
  }
}

bool known_dtype(int32_t dtype) { return dtype == MOEMB_FP32 || dtype == MOEMB_BF16 || dtype == MOEMB_FP16; }

int check_arguments(const MoembCausalConv& p) {
  if (moemb_cpu_isa() < MOEMB_ISA_AVX512) return MOEMB_UNSUPPORTED;
  if (!known_dtype(p.dtype) || !known_dtype(p.weight_dtype)) return MOEMB_UNSUPPORTED;
  if (p.taps < 1 || p.taps > kMaxTaps) return MOEMB_UNSUPPORTED;
  if (p.channels < 1 || p.segments < 0 || p.cu_seqlens[0] != 0 || p.cu_seqlens[p.segments] != p.tokens) {
    return MOEMB_BAD_ARGUMENT;
  }
  for (int64_t s = 0; s < p.segments; ++s) {
    if (p.cu_seqlens[s + 1] < p.cu_seqlens[s]) return MOEMB_BAD_ARGUMENT;
  }
  return MOEMB_OK;
}

float element(const void* values, int32_t dtype, int64_t index) {
  switch (dtype) {
    case MOEMB_FP32:
      return static_cast<const float*>(values)[index];
    case MOEMB_BF16:
      return _mm512_cvtss_f32(load(static_cast<const Bf16*>(values) + index, tail(1)));
    default:
      return _mm512_cvtss_f32(load(static_cast<const Fp16*>(values) + index, tail(1)));
  }
}

// Fills plan.weights: (channels, taps) in any dtype to (taps, weight_row) in fp32, zero behind the last channel. The
// caller frees it.
float* transposed_weights(const MoembCausalConv& p, int64_t weight_row) {
  float* weights = static_cast<float*>(calloc(static_cast<size_t>(p.taps * weight_row), sizeof(float)));
  if (weights == nullptr) return nullptr;
  for (int64_t c = 0; c < p.channels; ++c) {
    for (int64_t i = 0; i < p.taps; ++i) {
      weights[i * weight_row + c] = element(p.weight, p.weight_dtype, c * p.taps + i);
    }
  }
  return weights;
}

int64_t padded_channels(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

}  // namespace
}  // namespace moemb

extern "C" int moemb_cpu_causal_conv(const MoembCausalConv* inputs, void* output) {
  using namespace moemb;
  const int status = check_arguments(*inputs);
  if (status != MOEMB_OK) return status;
  const int64_t weight_row = padded_channels(inputs->channels);
  float* weights = transposed_weights(*inputs, weight_row);
  if (weights == nullptr) return MOEMB_NO_MEMORY;
  run_blocks(*inputs, {weights, weight_row, nullptr, output, nullptr});
  free(weights);
  return MOEMB_OK;
}

extern "C" int moemb_cpu_causal_conv_backward(const MoembCausalConv* inputs, const void* grad_output,
                                              void* grad_hidden, float* grad_weight) {
  using namespace moemb;
  const MoembCausalConv& p = *inputs;
  const int status = check_arguments(p);
  if (status != MOEMB_OK) return status;
  const int64_t weight_row = padded_channels(p.channels), blocks = (p.tokens + kBlock - 1) / kBlock;
  float* weights = transposed_weights(p, weight_row);
  float* sums = static_cast<float*>(malloc(static_cast<size_t>((blocks + 1) * p.taps * weight_row) * sizeof(float)));
  if (weights == nullptr || sums == nullptr) {
    free(weights);
    free(sums);
    return MOEMB_NO_MEMORY;
  }
  if (blocks > 0) run_blocks(p, {weights, weight_row, grad_output, grad_hidden, sums});
  for (int64_t b = 1; b < blocks; ++b) {
    const float* block = sums + b * p.taps * weight_row;
    for (int64_t d = 0; d < p.taps * weight_row; d += kLanes) store(sums + d, add(load(sums + d), load(block + d)));
  }
  if (grad_weight != nullptr) {
    for (int64_t c = 0; c < p.channels; ++c) {
      for (int64_t i = 0; i < p.taps; ++i) {
        grad_weight[c * p.taps + i] = blocks > 0 ? sums[i * weight_row + c] : 0.0f;
      }
    }
  }
  free(weights);
  free(sums);
  return MOEMB_OK;
}

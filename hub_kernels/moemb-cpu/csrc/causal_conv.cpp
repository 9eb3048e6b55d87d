// Depthwise causal convolution over packed segments, forward and backward. The tokens are cut into fixed blocks; a block
// walks its columns strip by strip and keeps the last inputs in registers, so every element is read once.
#include <stdlib.h>

#include "moemb_cpu.h"
#include "simd.h"

namespace moemb {
namespace {

constexpr int64_t kBlock = 256;  // tokens; grad_weight is summed in these blocks, so it must not depend on the threads
constexpr int kMaxTaps = 8;

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

// Forward, `kWidth` vectors of channels from `channel` on. weights: (taps, padded channels), oldest first.
template <typename T, int kTaps, int kWidth>
void convolve(const MoembCausalConv& p, const Piece& piece, const float* weights, int64_t weight_row, int64_t channel,
              T* output) {
  Mask mask[kWidth];
  Vec weight[kTaps][kWidth], recent[kTaps][kWidth];  // recent[i]: the input kTaps - 1 - i tokens ago
  const T* source = static_cast<const T*>(p.hidden_states) + channel;
  for (int v = 0; v < kWidth; ++v) {
    mask[v] = tail(p.channels - channel - v * kLanes);
    for (int i = 0; i < kTaps; ++i) weight[i][v] = load(weights + i * weight_row + channel + v * kLanes);
    for (int i = 0; i + 1 < kTaps; ++i) {
      const int64_t t = piece.begin - (kTaps - 1) + i;
      // skipped, not multiplied by 0: an item that holds NaN must not reach its neighbour
      recent[i + 1][v] = t < piece.start ? zeros() : load(source + t * p.token + v * kLanes, mask[v]);
    }
  }
  for (int64_t t = piece.begin; t < piece.end; ++t) {
    const T* row = source + t * p.token;
    T* target = output + t * p.channels + channel;
#pragma GCC unroll 2
    for (int v = 0; v < kWidth; ++v) {
#pragma GCC unroll 8
      for (int i = 0; i + 1 < kTaps; ++i) recent[i][v] = recent[i + 1][v];
      recent[kTaps - 1][v] = load(row + v * kLanes, mask[v]);
      Vec total = mul(weight[kTaps - 1][v], recent[kTaps - 1][v]);
#pragma GCC unroll 8
      for (int i = kTaps - 2; i >= 0; --i) total = fma(weight[i][v], recent[i][v], total);
      store(target + v * kLanes, p.silu ? silu(total) : total, mask[v]);
    }
  }
}

// The derivative of x * sigmoid(x).
inline Vec silu_slope(Vec x) {
  const Vec gate = sigmoid(x);
  return mul(gate, fma(x, sub(splat(1.0f), gate), splat(1.0f)));
}

// Backward, one vector of channels. Gradients of the sums are kept for kTaps tokens: the input of token t receives
// those of t .. t + kTaps - 1. Adds to grad_weight[i], the gradient of tap i.
template <typename T, int kTaps>
void convolve_backward(const MoembCausalConv& p, const Piece& piece, const float* weights, int64_t weight_row,
                       int64_t channel, const T* grad_output, T* grad_hidden, Vec grad_weight[kTaps]) {
  const Mask mask = tail(p.channels - channel);
  Vec weight[kTaps], recent[kTaps], grads[kTaps];
  const T* source = static_cast<const T*>(p.hidden_states) + channel;
  for (int i = 0; i < kTaps; ++i) {
    weight[i] = load(weights + i * weight_row + channel);
    grads[i] = zeros();
  }
  for (int i = 0; i + 1 < kTaps; ++i) {
    const int64_t t = piece.begin - (kTaps - 1) + i;
    recent[i + 1] = t < piece.start ? zeros() : load(source + t * p.token, mask);
  }
  // kTaps - 1 tokens more than the piece has: they complete the gradients of its last inputs
  for (int64_t t = piece.begin; t < piece.end + kTaps - 1; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i + 1 < kTaps; ++i) {
      recent[i] = recent[i + 1];
      grads[i] = grads[i + 1];
    }
    grads[kTaps - 1] = zeros();
    if (t < piece.stop) {
      recent[kTaps - 1] = load(source + t * p.token, mask);
      Vec grad = load(grad_output + t * p.channels + channel, mask);
      if (p.silu) {
        Vec total = mul(weight[kTaps - 1], recent[kTaps - 1]);
#pragma GCC unroll 8
        for (int i = kTaps - 2; i >= 0; --i) total = fma(weight[i], recent[i], total);
        grad = mul(grad, silu_slope(total));
      }
      grads[kTaps - 1] = grad;
      if (t < piece.end) {
#pragma GCC unroll 8
        for (int i = 0; i < kTaps; ++i) grad_weight[i] = fma(grad, recent[i], grad_weight[i]);
      }
    }
    const int64_t complete = t - (kTaps - 1);
    if (complete < piece.begin) continue;
    Vec total = mul(weight[kTaps - 1], grads[0]);
#pragma GCC unroll 8
    for (int i = 1; i < kTaps; ++i) total = fma(weight[kTaps - 1 - i], grads[i], total);
    store(grad_hidden + complete * p.channels + channel, total, mask);
  }
}

struct Plan {
  const float* weights;  // (taps, weight_row)
  int64_t weight_row;
  const void* grad_output;
  void* output;         // or grad_hidden
  float* grad_weights;  // (blocks, taps, weight_row)
};

template <typename T, int kTaps>
void forward_block(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  T* output = static_cast<T*>(plan.output);
  int64_t channel = 0;
  for (; channel + kLanes < p.channels; channel += 2 * kLanes) {
    for_pieces(p, index, [&](const Piece& piece) {
      convolve<T, kTaps, 2>(p, piece, plan.weights, plan.weight_row, channel, output);
    });
  }
  if (channel >= p.channels) return;
  for_pieces(p, index, [&](const Piece& piece) {
    convolve<T, kTaps, 1>(p, piece, plan.weights, plan.weight_row, channel, output);
  });
}

template <typename T, int kTaps>
void backward_block(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  for (int64_t channel = 0; channel < p.channels; channel += kLanes) {
    Vec grad_weight[kTaps];
    for (int i = 0; i < kTaps; ++i) grad_weight[i] = zeros();
    for_pieces(p, index, [&](const Piece& piece) {
      convolve_backward<T, kTaps>(p, piece, plan.weights, plan.weight_row, channel,
                                  static_cast<const T*>(plan.grad_output), static_cast<T*>(plan.output), grad_weight);
    });
    float* sums = plan.grad_weights + index * kTaps * plan.weight_row + channel;
    for (int i = 0; i < kTaps; ++i) store(sums + i * plan.weight_row, grad_weight[i]);
  }
}

template <typename T, int kTaps = kMaxTaps>
void block_of(const MoembCausalConv& p, const Plan& plan, int64_t index) {
  if (p.taps == kTaps) {
    plan.grad_output == nullptr ? forward_block<T, kTaps>(p, plan, index) : backward_block<T, kTaps>(p, plan, index);
  } else if constexpr (kTaps > 1) {
    block_of<T, kTaps - 1>(p, plan, index);
  }
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

// Strips are two vectors wide, so rows end on a multiple of two vectors.
int64_t padded_channels(int64_t channels) { return (channels + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

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

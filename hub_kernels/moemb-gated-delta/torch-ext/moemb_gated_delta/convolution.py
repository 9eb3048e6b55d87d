"""Varlen depthwise causal convolution in Triton: one program per (block of tokens, block of channels)."""

import triton
import triton.language as tl


@triton.jit
def segment_of(CU, token, segments, steps):
    """Index of the last entry of `cu_seqlens` not behind the token, by bisection in `steps`; skips empty segments."""
    low = tl.zeros_like(token)
    high = low + segments
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(CU + middle) <= token
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def _taps_sum(STATES, WEIGHT, row, live, start, channel, wide, stride, TAPS: tl.constexpr):
    total = tl.zeros((row.shape[0], channel.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        mask = (live & (source >= start))[:, None] & wide[None, :]
        states = tl.load(STATES + source.to(tl.int64)[:, None] * stride + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(WEIGHT + channel * TAPS + tap, mask=wide, other=0.0).to(tl.float32)
        total += states.to(tl.float32) * weight[None, :]
    return total


@triton.jit(do_not_specialize=["tokens", "segments", "steps"])
def conv_kernel(
    STATES,
    WEIGHT,
    CU,
    OUT,
    tokens,
    channels,
    segments,
    steps,
    stride,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[t, c] = activation(sum_tap weight[c, tap] states[t - taps + 1 + tap, c])` inside the segment of `t`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = row < tokens, channel < channels
    start = tl.load(CU + segment_of(CU, row, segments, steps))
    out = _taps_sum(STATES, WEIGHT, row, live, start, channel, wide, stride, TAPS)
    if SILU:
        out = out * tl.sigmoid(out)
    place = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["tokens", "segments", "steps"])
def conv_weight_gradient_kernel(
    STATES,
    WEIGHT,
    CU,
    GRAD_OUT,
    GRAD_SUM,
    GRAD_WEIGHT,
    tokens,
    channels,
    segments,
    steps,
    stride,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient before the activation, and this block's share of the weight's: partial sums, added later in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = row < tokens, channel < channels
    mask = live[:, None] & wide[None, :]
    start = tl.load(CU + segment_of(CU, row, segments, steps))
    place = row.to(tl.int64)[:, None] * channels + channel[None, :]
    grad = tl.load(GRAD_OUT + place, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        total = _taps_sum(STATES, WEIGHT, row, live, start, channel, wide, stride, TAPS)
        sigmoid = tl.sigmoid(total)
        grad = grad * sigmoid * (1.0 + total * (1.0 - sigmoid))
    tl.store(GRAD_SUM + place, grad, mask=mask)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        inside = (live & (source >= start))[:, None] & wide[None, :]
        states = tl.load(STATES + source.to(tl.int64)[:, None] * stride + channel[None, :], mask=inside, other=0.0)
        share = tl.sum(grad * states.to(tl.float32), axis=0)
        target = GRAD_WEIGHT + (tl.program_id(0).to(tl.int64) * channels + channel) * TAPS + tap
        tl.store(target, share, mask=wide)


@triton.jit(do_not_specialize=["tokens", "segments", "steps"])
def conv_state_gradient_kernel(
    GRAD_SUM,
    WEIGHT,
    CU,
    GRAD_STATES,
    tokens,
    channels,
    segments,
    steps,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of the states: a token hears from the tokens behind it that still belong to its segment."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = row < tokens, channel < channels
    end = tl.load(CU + segment_of(CU, row, segments, steps) + 1)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + (TAPS - 1 - tap)
        mask = (live & (source < end))[:, None] & wide[None, :]
        grad = tl.load(GRAD_SUM + source.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(WEIGHT + channel * TAPS + tap, mask=wide, other=0.0).to(tl.float32)
        total += grad * weight[None, :]
    place = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(GRAD_STATES + place, total.to(GRAD_STATES.dtype.element_ty), mask=live[:, None] & wide[None, :])

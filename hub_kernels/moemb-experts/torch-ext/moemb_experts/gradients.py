"""Backward products in Triton: through the down projection and SwiGLU, and the gradients of the expert matrices."""

import triton
import triton.language as tl

from .products import accumulate


@triton.jit
def _gate_up_gradient_tile(
    GRAD_OUT,
    DOWN,
    WEIGHT,
    ORDER,
    SAVED,
    GRAD_SAVED,
    GATED,
    GRAD_WEIGHT,
    expert,
    first,
    last,
    column,
    slots,
    pairs,
    hidden,
    width,
    stride_grad,
    stride_expert,
    stride_row,
    GATES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of `gate_up_gradient_kernel`; sorted rows `first` to `last`, at most ROWS."""
    row = first + tl.arange(0, ROWS)
    live = row < last
    pair = tl.load(ORDER + row, mask=live, other=0)
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    wide = n < width
    inner = tl.arange(0, DEPTH)
    rows = GRAD_OUT + (pair // slots).to(tl.int64)[:, None] * stride_grad + inner[None, :]
    matrix = DOWN + expert.to(tl.int64) * stride_expert + n[None, :] + inner[:, None] * stride_row
    grad = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    grad = accumulate(grad, rows, live, matrix, wide, hidden, stride_row, EVEN, DEPTH, UPCAST, PRECISION)

    stored = live[:, None] & wide[None, :]
    place = row.to(tl.int64)[:, None]
    saved = place * (2 * width) + n[None, :]
    gate = tl.load(SAVED + saved, mask=stored, other=0.0).to(tl.float32)
    up = tl.load(SAVED + saved + width, mask=stored, other=0.0).to(tl.float32)
    scale = tl.load(WEIGHT + pair, mask=live, other=0.0).to(tl.float32)[:, None]
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    # one row of partial sums per block of columns, added later in a fixed order
    tl.store(GRAD_WEIGHT + column.to(tl.int64) * pairs + pair, tl.sum(grad * silu * up, axis=1), mask=live)
    grad_gate = scale * grad * up * (sigmoid + silu - silu * sigmoid)
    grad_up = scale * grad * silu
    tl.store(GRAD_SAVED + saved, grad_gate.to(GRAD_SAVED.dtype.element_ty), mask=stored)
    tl.store(GRAD_SAVED + saved + width, grad_up.to(GRAD_SAVED.dtype.element_ty), mask=stored)
    if GATES:
        gated = scale * silu * up
        tl.store(GATED + place * width + n[None, :], gated.to(GATED.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["slots", "pairs", "num_experts", "blocks"])
def gate_up_gradient_kernel(
    GRAD_OUT,
    DOWN,
    WEIGHT,
    ORDER,
    OFFSETS,
    TILE_EXPERT,
    TILE_ROW,
    SAVED,
    GRAD_SAVED,
    GATED,
    GRAD_WEIGHT,
    slots,
    pairs,
    num_experts,
    hidden,
    width,
    blocks,
    stride_grad,
    stride_expert,
    stride_row,
    GATES: tl.constexpr,
    EVEN: tl.constexpr,
    FIXED: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the gate and up rows and of the routing weight; with GATES also the weighted activation again."""
    tile, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(TILE_EXPERT + tile)
    if expert < num_experts:
        first, last = tl.load(TILE_ROW + tile), tl.load(OFFSETS + expert + 1)
        # fmt: off
        if HEIGHT >= 64 and not FIXED and last - first <= HEIGHT // 4:
            _gate_up_gradient_tile(
                GRAD_OUT, DOWN, WEIGHT, ORDER, SAVED, GRAD_SAVED, GATED, GRAD_WEIGHT, expert, first, last, column,
                slots, pairs, hidden, width, stride_grad, stride_expert, stride_row,
                GATES, EVEN, HEIGHT // 4, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        elif HEIGHT >= 32 and not FIXED and last - first <= HEIGHT // 2:
            _gate_up_gradient_tile(
                GRAD_OUT, DOWN, WEIGHT, ORDER, SAVED, GRAD_SAVED, GATED, GRAD_WEIGHT, expert, first, last, column,
                slots, pairs, hidden, width, stride_grad, stride_expert, stride_row,
                GATES, EVEN, HEIGHT // 2, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        else:
            last = tl.minimum(last, first + HEIGHT)
            _gate_up_gradient_tile(
                GRAD_OUT, DOWN, WEIGHT, ORDER, SAVED, GRAD_SAVED, GATED, GRAD_WEIGHT, expert, first, last, column,
                slots, pairs, hidden, width, stride_grad, stride_expert, stride_row,
                GATES, EVEN, HEIGHT, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        # fmt: on


@triton.jit(do_not_specialize=["slots", "blocks_height", "blocks_width"])
def matrix_gradient_kernel(
    LEFT,
    RIGHT,
    ORDER,
    OFFSETS,
    OUT,
    slots,
    height,
    width,
    blocks_height,
    blocks_width,
    stride_left,
    stride_right,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`left^T right` over the rows of each expert; an expert without rows gets zeros. GATHER reads token rows."""
    block = tl.program_id(0)
    expert = block // (blocks_height * blocks_width)
    block = block % (blocks_height * blocks_width)
    m = (block // blocks_width) * ROWS + tl.arange(0, ROWS)
    n = (block % blocks_width) * COLUMNS + tl.arange(0, COLUMNS)
    high, wide = m < height, n < width
    first, last = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, last, DEPTH):
        row = start + tl.arange(0, DEPTH)
        live = row < last
        token = tl.load(ORDER + row, mask=live, other=0) // slots
        left_row = (token if GATHER_LEFT else row).to(tl.int64)
        right_row = (token if GATHER_RIGHT else row).to(tl.int64)
        left = tl.load(
            LEFT + left_row[None, :] * stride_left + m[:, None], mask=high[:, None] & live[None, :], other=0.0
        )
        right = tl.load(
            RIGHT + right_row[:, None] * stride_right + n[None, :], mask=live[:, None] & wide[None, :], other=0.0
        )
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    place = (expert.to(tl.int64) * height + m[:, None]) * width + n[None, :]
    tl.store(OUT + place, acc.to(OUT.dtype.element_ty), mask=high[:, None] & wide[None, :])

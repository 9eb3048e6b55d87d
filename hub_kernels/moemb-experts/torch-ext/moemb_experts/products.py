"""Grouped matrix products in Triton: one program per (tile of an expert's rows, block of output columns).

The gather of the tokens is the prologue of the products that read tokens; SwiGLU and the routing weight are the
epilogue of the first. All sums are over the depth in one order, so no result depends on timing: there are no atomics.
Arguments that change from batch to batch are not specialised: a new batch must not compile anew.
"""

import triton
import triton.language as tl


@triton.jit
def accumulate(
    acc,
    rows,
    live,
    matrix,
    wide,
    depth,
    stride_depth,
    EVEN: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc + rows @ matrix` over `depth`: `rows` are pointers (ROWS, DEPTH), `matrix` pointers (DEPTH, COLUMNS)."""
    inner = tl.arange(0, DEPTH)
    for start in range(0, depth, DEPTH):
        if EVEN:
            left = tl.load(rows, mask=live[:, None], other=0.0)
            right = tl.load(matrix, mask=wide[None, :], other=0.0)
        else:
            inside = inner < depth - start
            left = tl.load(rows, mask=live[:, None] & inside[None, :], other=0.0)
            right = tl.load(matrix, mask=wide[None, :] & inside[:, None], other=0.0)
        if UPCAST:  # the interpreter multiplies the bit patterns of bf16
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        rows += DEPTH
        matrix += DEPTH * stride_depth
    return acc


@triton.jit
def _gate_up_tile(
    STATES,
    GATE_UP,
    WEIGHT,
    ORDER,
    GATED,
    SAVED,
    expert,
    first,
    last,
    column,
    slots,
    hidden,
    width,
    stride_states,
    stride_expert,
    stride_row,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of `gate_up_kernel`; sorted rows `first` to `last`, at most ROWS."""
    row = first + tl.arange(0, ROWS)
    live = row < last
    pair = tl.load(ORDER + row, mask=live, other=0)
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    wide = n < width
    inner = tl.arange(0, DEPTH)
    states = STATES + (pair // slots).to(tl.int64)[:, None] * stride_states + inner[None, :]
    gates = GATE_UP + expert.to(tl.int64) * stride_expert + n[None, :] * stride_row + inner[:, None]
    ups = gates + width * stride_row
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, hidden, DEPTH):
        if EVEN:
            left = tl.load(states, mask=live[:, None], other=0.0)
            right = tl.load(gates, mask=wide[None, :], other=0.0)
            other = tl.load(ups, mask=wide[None, :], other=0.0)
        else:
            inside = inner < hidden - start
            left = tl.load(states, mask=live[:, None] & inside[None, :], other=0.0)
            right = tl.load(gates, mask=wide[None, :] & inside[:, None], other=0.0)
            other = tl.load(ups, mask=wide[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            left, right, other = left.to(tl.float32), right.to(tl.float32), other.to(tl.float32)
        gate = tl.dot(left, right, gate, input_precision=PRECISION)
        up = tl.dot(left, other, up, input_precision=PRECISION)
        states += DEPTH
        gates += DEPTH
        ups += DEPTH
    scale = tl.load(WEIGHT + pair, mask=live, other=0.0).to(tl.float32)
    stored = live[:, None] & wide[None, :]
    place = row.to(tl.int64)[:, None]
    if SAVE:
        saved = SAVED + place * (2 * width) + n[None, :]
        tl.store(saved, gate.to(SAVED.dtype.element_ty), mask=stored)
        tl.store(saved + width, up.to(SAVED.dtype.element_ty), mask=stored)
    gated = gate * tl.sigmoid(gate) * up * scale[:, None]
    tl.store(GATED + place * width + n[None, :], gated.to(GATED.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["slots", "num_experts", "blocks"])
def gate_up_kernel(
    STATES,
    GATE_UP,
    WEIGHT,
    ORDER,
    OFFSETS,
    TILE_EXPERT,
    TILE_ROW,
    GATED,
    SAVED,
    slots,
    num_experts,
    hidden,
    width,
    blocks,
    stride_states,
    stride_expert,
    stride_row,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    FIXED: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`weight * silu(x gate^T) * (x up^T)` of every routed pair, rows sorted by expert."""
    tile, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(TILE_EXPERT + tile)
    if expert < num_experts:
        first, last = tl.load(TILE_ROW + tile), tl.load(OFFSETS + expert + 1)
        # fmt: off
        if HEIGHT >= 64 and not FIXED and last - first <= HEIGHT // 4:
            _gate_up_tile(
                STATES, GATE_UP, WEIGHT, ORDER, GATED, SAVED, expert, first, last, column, slots, hidden, width,
                stride_states, stride_expert, stride_row, SAVE, EVEN, HEIGHT // 4, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        elif HEIGHT >= 32 and not FIXED and last - first <= HEIGHT // 2:
            _gate_up_tile(
                STATES, GATE_UP, WEIGHT, ORDER, GATED, SAVED, expert, first, last, column, slots, hidden, width,
                stride_states, stride_expert, stride_row, SAVE, EVEN, HEIGHT // 2, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        else:
            last = tl.minimum(last, first + HEIGHT)
            _gate_up_tile(
                STATES, GATE_UP, WEIGHT, ORDER, GATED, SAVED, expert, first, last, column, slots, hidden, width,
                stride_states, stride_expert, stride_row, SAVE, EVEN, HEIGHT, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        # fmt: on


@triton.jit
def _row_tile(
    ROWS_IN,
    MATRIX,
    ORDER,
    PAIRS_OUT,
    expert,
    first,
    last,
    column,
    depth,
    width,
    stride_expert,
    stride_depth,
    stride_column,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of `row_kernel`; sorted rows `first` to `last`, at most ROWS."""
    row = first + tl.arange(0, ROWS)
    live = row < last
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    wide = n < width
    inner = tl.arange(0, DEPTH)
    rows = ROWS_IN + row.to(tl.int64)[:, None] * depth + inner[None, :]
    matrix = MATRIX + expert.to(tl.int64) * stride_expert + n[None, :] * stride_column + inner[:, None] * stride_depth
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    acc = accumulate(acc, rows, live, matrix, wide, depth, stride_depth, EVEN, DEPTH, UPCAST, PRECISION)
    pair = tl.load(ORDER + row, mask=live, other=0).to(tl.int64)
    stored = live[:, None] & wide[None, :]
    tl.store(PAIRS_OUT + pair[:, None] * width + n[None, :], acc.to(PAIRS_OUT.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_experts", "blocks"])
def row_kernel(
    ROWS_IN,
    MATRIX,
    ORDER,
    OFFSETS,
    TILE_EXPERT,
    TILE_ROW,
    PAIRS_OUT,
    num_experts,
    depth,
    width,
    blocks,
    stride_expert,
    stride_depth,
    stride_column,
    EVEN: tl.constexpr,
    FIXED: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sorted rows times their expert's matrix, stored at the (token, slot) pair each row came from."""
    tile, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(TILE_EXPERT + tile)
    if expert < num_experts:
        first, last = tl.load(TILE_ROW + tile), tl.load(OFFSETS + expert + 1)
        # fmt: off
        if HEIGHT >= 64 and not FIXED and last - first <= HEIGHT // 4:
            _row_tile(
                ROWS_IN, MATRIX, ORDER, PAIRS_OUT, expert, first, last, column, depth, width,
                stride_expert, stride_depth, stride_column, EVEN, HEIGHT // 4, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        elif HEIGHT >= 32 and not FIXED and last - first <= HEIGHT // 2:
            _row_tile(
                ROWS_IN, MATRIX, ORDER, PAIRS_OUT, expert, first, last, column, depth, width,
                stride_expert, stride_depth, stride_column, EVEN, HEIGHT // 2, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        else:
            last = tl.minimum(last, first + HEIGHT)
            _row_tile(
                ROWS_IN, MATRIX, ORDER, PAIRS_OUT, expert, first, last, column, depth, width,
                stride_expert, stride_depth, stride_column, EVEN, HEIGHT, COLUMNS, DEPTH, UPCAST, PRECISION,
            )
        # fmt: on


@triton.jit(do_not_specialize=["tokens", "num_experts"])
def combine_kernel(
    PAIRS,
    INDEX,
    OUT,
    tokens,
    num_experts,
    width,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum over a token's slots in their own order; the rows of skipped slots were never written and are not read."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, wide = token < tokens, n < width
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for slot in range(SLOTS):
        pair = token.to(tl.int64) * SLOTS + slot
        expert = tl.load(INDEX + pair, mask=inside, other=-1)
        live = (expert >= 0) & (expert < num_experts)
        total += tl.load(PAIRS + pair[:, None] * width + n[None, :], mask=live[:, None] & wide[None, :], other=0.0).to(
            tl.float32
        )
    place = token.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=inside[:, None] & wide[None, :])

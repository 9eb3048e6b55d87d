"""RMSNorms in Triton: one program per block of rows, the last axis whole."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    STATES,
    GATE,
    WEIGHT,
    OUT,
    rows,
    dim,
    eps,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """GATED: `unit(x) * weight * silu(gate)`; else `unit(x) * (1 + weight)`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < dim)[None, :]
    place = row.to(tl.int64)[:, None] * dim + column[None, :]
    states = tl.load(STATES + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + column, mask=column < dim, other=0.0).to(tl.float32)
    unit = states * tl.rsqrt(tl.sum(states * states, axis=1) / dim + eps)[:, None]
    if GATED:
        gate = tl.load(GATE + place, mask=mask, other=0.0).to(tl.float32)
        out = unit * weight[None, :] * gate * tl.sigmoid(gate)
    else:
        out = unit * (1.0 + weight)[None, :]
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "programs"])
def norm_gradient_kernel(
    STATES,
    GATE,
    WEIGHT,
    GRAD_OUT,
    GRAD_STATES,
    GRAD_GATE,
    GRAD_WEIGHT,
    rows,
    dim,
    eps,
    programs,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of states and gate, and each program's share of the weight's: partial sums, added later in order."""
    column = tl.arange(0, COLUMNS)
    inside = column < dim
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * dim + column[None, :]
        states = tl.load(STATES + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(GRAD_OUT + place, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(states * states, axis=1) / dim + eps)[:, None]
        unit = states * inverse
        if GATED:
            gate = tl.load(GATE + place, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            grad_gate = grad * unit * weight[None, :] * (sigmoid + silu * (1.0 - sigmoid))
            tl.store(GRAD_GATE + place, grad_gate.to(GRAD_GATE.dtype.element_ty), mask=mask)
            share += tl.sum(grad * unit * silu, axis=0)
            grad = grad * silu * weight[None, :]
        else:
            share += tl.sum(grad * unit, axis=0)
            grad = grad * (1.0 + weight)[None, :]
        grad = (grad - unit * (tl.sum(grad * unit, axis=1) / dim)[:, None]) * inverse
        tl.store(GRAD_STATES + place, grad.to(GRAD_STATES.dtype.element_ty), mask=mask)
    tl.store(GRAD_WEIGHT + tl.program_id(0).to(tl.int64) * dim + column, share, mask=inside)

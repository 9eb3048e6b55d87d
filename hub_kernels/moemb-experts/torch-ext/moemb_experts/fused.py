"""Experts through the Triton kernels: three launches forward, three backward, no wait for the device."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gradients import gate_up_gradient_kernel, matrix_gradient_kernel
from .products import combine_kernel, gate_up_kernel, row_kernel
from .schedule import Schedule, tile_height


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Blocks(NamedTuple):
    """Block sizes and launch options of one kernel."""

    columns: int
    depth: int
    warps: int
    stages: int


def blocks_of(kind: str, height: int, dtype: torch.dtype) -> Blocks:
    """Block sizes of a kernel for a tile height; `kind` is `gate_up` (two accumulators), `gradient` (a
    long epilogue), `rows` or `matrix`.

    Chosen so that the accumulators fit the registers and the stages the shared memory of compute capability 9.0;
    fp32 runs on the plain floating-point units, where larger blocks only spill.
    """
    if dtype == torch.float32:
        return Blocks(32 if kind == "gate_up" else 64, 32, 4, 2)
    if kind == "gate_up":
        return Blocks(128, 64, 8, 3) if height == 128 else Blocks(64, 64, 4, 4)
    if kind == "gradient":
        return Blocks(64, 64, 8 if height == 128 else 4, 4)
    return Blocks(128, 64, 8 if height == 128 else 4, 3)


def fixed_height() -> int | None:
    """Height that `MOEMB_EXPERTS_TILE` asks for; with it a token's bits do not depend on what shares its batch."""
    value = os.environ.get("MOEMB_EXPERTS_TILE", "")
    if not value:
        return None
    if value not in ("16", "32", "64", "128"):
        raise ValueError(f"MOEMB_EXPERTS_TILE must be 16, 32, 64 or 128, got {value!r}")
    return int(value)


def _precision(dtype: torch.dtype) -> str:
    tf32 = dtype == torch.float32 and not INTERPRETED and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def _options(kind: str, height: int, dtype: torch.dtype, depth: int | None = None) -> dict:
    blocks = blocks_of(kind, height, dtype)
    options = {"COLUMNS": blocks.columns, "DEPTH": blocks.depth, "UPCAST": INTERPRETED, "PRECISION": _precision(dtype)}
    if depth is not None:
        options.update(EVEN=depth % blocks.depth == 0, FIXED=fixed_height() is not None, HEIGHT=height)
    return {**options, "num_warps": blocks.warps, "num_stages": blocks.stages}


def _rows_product(rows: Tensor, matrix: Tensor, transposed: bool, plan: Schedule, out: Tensor) -> None:
    """`out[pair] = rows[row] @ matrix[expert]`, or times the transpose; `out` is `(pairs, width)`."""
    depth, width = rows.shape[1], out.shape[1]
    options = _options("rows", plan.height, rows.dtype, depth)
    blocks = triton.cdiv(width, options["COLUMNS"])
    along, across = (2, 1) if transposed else (1, 2)
    row_kernel[(plan.tiles * blocks,)](
        rows,
        matrix,
        plan.order,
        plan.offsets,
        plan.tile_expert,
        plan.tile_row,
        out,
        plan.num_experts,
        depth,
        width,
        blocks,
        matrix.stride(0),
        matrix.stride(along),
        matrix.stride(across),
        **options,
    )


def _combine(pairs: Tensor, expert_index: Tensor, num_experts: int) -> Tensor:
    """Sum `(tokens * slots, width)` over the slots that are not skipped."""
    (tokens, slots), width = expert_index.shape, pairs.shape[1]
    out = torch.empty(tokens, width, dtype=pairs.dtype, device=pairs.device)
    rows, columns = 4, min(512, triton.next_power_of_2(width))
    combine_kernel[(triton.cdiv(tokens, rows), triton.cdiv(width, columns))](
        pairs, expert_index, out, tokens, num_experts, width, SLOTS=slots, ROWS=rows, COLUMNS=columns
    )
    return out


def _matrix_gradient(left: Tensor, right: Tensor, gathered: str, plan: Schedule, like: Tensor) -> Tensor:
    """Gradient of the expert matrices `like`: per expert `left^T right`; `gathered` names the side of token rows."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    num_experts, height, width = like.shape
    options = _options("matrix", 64, left.dtype)
    rows = 64
    blocks_height, blocks_width = triton.cdiv(height, rows), triton.cdiv(width, options["COLUMNS"])
    matrix_gradient_kernel[(num_experts * blocks_height * blocks_width,)](
        left,
        right,
        plan.order,
        plan.offsets,
        out,
        plan.slots,
        height,
        width,
        blocks_height,
        blocks_width,
        left.stride(0),
        right.stride(0),
        GATHER_LEFT=gathered == "left",
        GATHER_RIGHT=gathered == "right",
        ROWS=rows,
        **options,
    )
    return out


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        num_experts, hidden, width = down.shape
        plan = Schedule(index, num_experts, fixed_height() or tile_height(index.numel(), num_experts))
        save = any(ctx.needs_input_grad)
        gated = torch.empty(plan.pairs, width, dtype=states.dtype, device=states.device)
        saved = torch.empty(plan.pairs, 2 * width, dtype=states.dtype, device=states.device) if save else gated
        options = _options("gate_up", plan.height, states.dtype, hidden)
        blocks = triton.cdiv(width, options["COLUMNS"])
        gate_up_kernel[(plan.tiles * blocks,)](
            states,
            gate_up,
            weight,
            plan.order,
            plan.offsets,
            plan.tile_expert,
            plan.tile_row,
            gated,
            saved,
            plan.slots,
            num_experts,
            hidden,
            width,
            blocks,
            states.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
            SAVE=save,
            **options,
        )
        pairs = torch.empty(plan.pairs, hidden, dtype=states.dtype, device=states.device)
        _rows_product(gated, down, True, plan, pairs)
        if save:
            ctx.plan = plan
            ctx.save_for_backward(states, index, weight, gate_up, down, saved)
        return _combine(pairs, index, num_experts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, index, weight, gate_up, down, saved = ctx.saved_tensors
        plan, (num_experts, hidden, width) = ctx.plan, down.shape
        need_states, _, need_weight, need_gate_up, need_down = ctx.needs_input_grad
        grad_output = grad_output.contiguous()
        grad_saved = torch.empty_like(saved)
        gated = torch.empty(plan.pairs, width, dtype=saved.dtype, device=saved.device) if need_down else saved
        options = _options("gradient", plan.height, saved.dtype, hidden)
        blocks = triton.cdiv(width, options["COLUMNS"])
        partial = torch.zeros(blocks, plan.pairs, dtype=torch.float32, device=saved.device)
        gate_up_gradient_kernel[(plan.tiles * blocks,)](
            grad_output,
            down,
            weight,
            plan.order,
            plan.offsets,
            plan.tile_expert,
            plan.tile_row,
            saved,
            grad_saved,
            gated,
            partial,
            plan.slots,
            plan.pairs,
            num_experts,
            hidden,
            width,
            blocks,
            grad_output.stride(0),
            down.stride(0),
            down.stride(1),
            GATES=need_down,
            **options,
        )
        grad_states = None
        if need_states:
            pairs = torch.empty(plan.pairs, hidden, dtype=states.dtype, device=states.device)
            _rows_product(grad_saved, gate_up, False, plan, pairs)
            grad_states = _combine(pairs, index, num_experts)
        grad_weight = partial.sum(0).view_as(weight).to(weight.dtype) if need_weight else None
        grad_gate_up = _matrix_gradient(grad_saved, states, "right", plan, gate_up) if need_gate_up else None
        grad_down = _matrix_gradient(grad_output, gated, "left", plan, down) if need_down else None
        return grad_states, None, grad_weight, grad_gate_up, grad_down


def experts_fused(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Tile-aware grouped products in Triton; shapes and dtypes as in `experts`."""
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    if gate_up_proj.stride(2) != 1:
        gate_up_proj = gate_up_proj.contiguous()
    if down_proj.stride(2) != 1:
        down_proj = down_proj.contiguous()
    if expert_index.numel() == 0 or gate_up_proj.shape[0] == 0:
        return torch.zeros_like(hidden_states) + hidden_states[:0].sum()
    return _FusedExperts.apply(hidden_states, expert_index.contiguous(), weight.contiguous(), gate_up_proj, down_proj)

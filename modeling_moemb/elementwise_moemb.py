"""Row-wise operations whose hand-written backward keeps one input instead of a chain of temporaries.

On the CPU the small models of this family spend more time here than in matrix products. All arithmetic is fp32; the
result has the dtype that the next matrix product wants, so an activation is cast once and not once per projection.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeRMSNormGated

from .kernels_moemb import kernel


def compute_dtype(states: Tensor) -> torch.dtype:
    """The dtype of the matrix products fed by `states`: autocast's when active, else that of `states`."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def sigmoid(states: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, in the dtype of `states`; see [`steady`]."""
    return torch.sigmoid(steady(states)).to(states.dtype)


def softplus(states: Tensor) -> Tensor:
    """`log(1 + exp(x))`, in the dtype of `states`; see [`steady`]."""
    return torch.nn.functional.softplus(steady(states)).to(states.dtype)


def steady(states: Tensor) -> Tensor:
    """`states` in a precision in which an element's result does not depend on its place in the batch.

    On the CPU torch computes exponentials by vectors, and what is left over at the end one by one: the two differ in
    the last bit. At inference that bit is one of fp64, and gone when the result is rounded.
    """
    return states.double() if states.device.type == "cpu" and not torch.is_grad_enabled() else states


class _UnitNorm(torch.autograd.Function):
    """`x / sqrt(sum(x^2) + eps) * scale` over the last axis, `scale` a vector or a number."""

    @staticmethod
    def forward(ctx, states: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows = states.float()
        inverse = (torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_() + eps).rsqrt_()
        ctx.save_for_backward(states, scale, inverse)
        return (rows * inverse).mul_(scale.float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, scale, inverse = ctx.saved_tensors
        unit = states.float() * inverse
        grad = grad_output.float()
        grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_scale = (grad * unit).reshape(-1, unit.shape[-1]).sum(0).to(scale.dtype)
        grad = grad * scale.float()
        along = (grad * unit).sum(-1, keepdim=True)
        return grad.sub_(unit.mul_(along)).mul_(inverse).to(states.dtype), grad_scale, None, None


def unit_norm(states: Tensor, factor: float = 1.0, eps: float = 1e-6) -> Tensor:
    """L2-normalise the last axis (`eps` inside the square root) and multiply by `factor`; fp32 out."""
    scale = torch.full((), factor, dtype=torch.float32, device=states.device)
    return _UnitNorm.apply(states, scale, eps, torch.float32)


def rms_norm(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, fp32 inside, `dtype` out."""
    dim = states.shape[-1]
    return _UnitNorm.apply(states, weight * dim**0.5, eps * dim, dtype)


class MoEMBRMSNorm(Qwen3_5MoeRMSNorm):
    """Zero-centred RMSNorm; parameters as in transformers' class."""

    def forward(self, states: Tensor) -> Tensor:
        dtype = compute_dtype(states)
        run = kernel("rms_norm", states, self.weight)
        if run is not None:
            return run(states, self.weight, self.eps, dtype)
        return rms_norm(states, 1.0 + self.weight.float(), self.eps, dtype)


class _GatedNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * weight * silu(gate)` over the last axis, out in the dtype of `gate`."""

    @staticmethod
    def forward(ctx, states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, gates, dim = states.float(), gate.float(), states.shape[-1]
        inverse = (torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(dim) + eps).rsqrt_()
        ctx.save_for_backward(states, gate, weight, inverse)
        return (rows * inverse).mul_(weight.float()).mul_(torch.nn.functional.silu(gates)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, gate, weight, inverse = ctx.saved_tensors
        gates, dim = gate.float(), states.shape[-1]
        unit = states.float() * inverse
        sigmoid = torch.sigmoid(gates)
        grad = grad_output.float()
        product = grad * unit  # shared by the gradients of the weight and of the gate
        silu = gates * sigmoid
        grad_weight = (product * silu).reshape(-1, dim).sum(0).to(weight.dtype)
        grad_gate = product.mul_(weight.float()).mul_(sigmoid.add_(silu - silu * sigmoid)).to(gate.dtype)
        grad = grad.mul(silu.mul_(weight.float()))
        along = (grad * unit).mean(-1, keepdim=True)
        return grad.sub_(unit.mul_(along)).mul_(inverse).to(states.dtype), grad_gate, grad_weight, None


class MoEMBRMSNormGated(Qwen3_5MoeRMSNormGated):
    """RMSNorm of each value head, then the SiLU gate; parameters as in transformers' class."""

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        run = kernel("gated_rms_norm", states, gate, self.weight)
        if run is not None:
            return run(states, gate, self.weight, self.variance_epsilon)
        return _GatedNorm.apply(states, gate, self.weight, self.variance_epsilon)


class _Rotate(torch.autograd.Function):
    """Rotary embedding of the leading `cos.shape[-1]` features; the rest passes through."""

    @staticmethod
    def forward(ctx, states: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = states.dtype
        return _rotated(states, cos, sin).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grad_output, cos, -sin).to(ctx.dtype), None, None, None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, half = cos.shape[-1], cos.shape[-1] // 2
    rows = states.float()
    rotated = rows.clone() if rows.shape[-1] > rotary else torch.empty_like(rows)
    torch.mul(rows[..., :rotary], cos, out=rotated[..., :rotary])
    rotated[..., :half].addcmul_(rows[..., half:rotary], sin[..., :half], value=-1)
    rotated[..., half:rotary].addcmul_(rows[..., :half], sin[..., half:])
    return rotated


def rotate(states: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply rotary position embeddings.

    Args:
        states (`torch.Tensor` of shape `(tokens, heads, dim)`): queries or keys.
        cos, sin (`torch.FloatTensor` of shape `(tokens, rotary_dim)`): both halves of the tables equal.
        dtype (`torch.dtype`): dtype of the result.
    """
    run = kernel("rotary", states, cos, sin)
    if run is not None:
        return run(states, cos, sin, dtype)
    return _Rotate.apply(states, cos.float()[:, None], sin.float()[:, None], dtype)

"""The operators have no forward-mode gradients: asked for one, they say so instead of returning no tangent."""

import pytest
import torch
from torch.autograd import forward_ad


def rows(*shape):
    return torch.randn(shape)


LENGTHS = torch.tensor([0, 4], dtype=torch.int32)
INDEX = torch.zeros(4, 2, dtype=torch.int64)
CALLS = {
    "experts": (lambda op, x: op(x, INDEX, rows(4, 2), rows(3, 32, 16), rows(3, 16, 16)), (4, 16)),
    "linear": (lambda op, x: op(x, rows(8, 16)), (4, 16)),
    "gated_delta_rule": (
        lambda op, x: op(x, rows(4, 1, 16), rows(4, 1, 16), -rows(4, 1).abs(), rows(4, 1).sigmoid(), LENGTHS),
        (4, 1, 16),
    ),
    "causal_conv": (lambda op, x: op(x, rows(16, 4), LENGTHS, "silu"), (4, 16)),
    "rms_norm": (lambda op, x: op(x, rows(16), 1e-6, torch.float32), (4, 16)),
    "gated_rms_norm": (lambda op, x: op(x, rows(4, 16), rows(16), 1e-6), (4, 16)),
    "top_k_router": (lambda op, x: op(x, 2), (4, 16)),
    "varlen_attention": (lambda op, x: op(x, rows(4, 1, 16), rows(4, 1, 16), LENGTHS, 0.25, True), (4, 1, 16)),
    "swiglu": (lambda op, x: op(x, rows(4, 16)), (4, 16)),
    "rotary": (lambda op, x: op(x, rows(4, 8), rows(4, 8), torch.float32), (4, 1, 16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_is_refused(moemb_cpu, name):
    call, shape = CALLS[name]
    call(getattr(moemb_cpu, name), rows(*shape))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        call(getattr(moemb_cpu, name), forward_ad.make_dual(rows(*shape), rows(*shape)))

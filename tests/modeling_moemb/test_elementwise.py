"""Hand-written backward passes against autograd of the plain formula in fp64."""

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb.elementwise_moemb import MoEMBRMSNorm, MoEMBRMSNormGated, rotate, unit_norm


def check(ours, exact, inputs, tolerance=1e-5):
    mine = [tensor.float().requires_grad_() for tensor in inputs]
    reference = [tensor.clone().requires_grad_() for tensor in inputs]
    actual, expected = ours(*mine), exact(*reference)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    grad = torch.randn_like(expected)
    actual.backward(grad.float())
    expected.backward(grad)
    for left, right in zip(mine, reference):
        torch.testing.assert_close(left.grad.double(), right.grad, atol=10 * tolerance, rtol=10 * tolerance)


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_rms_norm_is_zero_centred():
    module = MoEMBRMSNorm(16, eps=1e-6)

    def ours(x, weight):
        module.weight = torch.nn.Parameter(weight.detach())
        del module.weight
        module.weight = weight
        return module(x)

    check(ours, lambda x, weight: rms(x, 1e-6) * (1 + weight), [torch.randn(9, 16).double(), torch.randn(16).double()])


def test_gated_rms_norm():
    module = MoEMBRMSNormGated(16, eps=1e-6)

    def ours(x, gate, weight):
        if "weight" in module._parameters:
            del module.weight
        module.weight = weight
        return module(x, gate)

    inputs = [torch.randn(9, 3, 16).double(), torch.randn(9, 3, 16).double(), torch.randn(16).double()]
    check(ours, lambda x, gate, weight: rms(x, 1e-6) * weight * F.silu(gate), inputs)


def test_unit_norm():
    check(
        lambda x: unit_norm(x, 0.25),
        lambda x: 0.25 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        [torch.randn(7, 2, 8).double()],
    )


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotate(rotary_dim):
    angles = torch.randn(7, rotary_dim // 2).double()
    cos, sin = (torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin()))

    def exact(x):
        head, tail = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return torch.cat([head * cos[:, None] + turned * sin[:, None], tail], dim=-1)

    check(lambda x: rotate(x, cos, sin, torch.float32), exact, [torch.randn(7, 3, 16).double()])


def test_norms_hand_over_the_autocast_dtype():
    states = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert MoEMBRMSNorm(16)(states).dtype == torch.bfloat16
    assert MoEMBRMSNorm(16)(states).dtype == torch.float32
    assert MoEMBRMSNorm(16)(states.bfloat16()).dtype == torch.bfloat16

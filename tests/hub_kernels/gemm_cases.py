"""Inputs and measures shared by the tests of experts and linear layers."""

import pytest
import torch
from torch import Tensor


# relative error of a whole result: fp32 sums of up to 2,050 terms; 8 and 11 bits of bf16 and fp16 after two products
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# bf16 takes two routes
ROUTES = [
    pytest.param(torch.float32, "amx", id="fp32"),
    pytest.param(torch.float16, "amx", id="fp16"),
    pytest.param(torch.bfloat16, "avx512", id="bf16-avx512"),
    pytest.param(torch.bfloat16, "amx", id="bf16-amx"),
]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN and missing values count as infinite."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return difference.item() if torch.isfinite(difference) else float("inf")

"""The Triton experts against the fp64 oracle, without a GPU."""

import pytest

from tests.hub_kernels.noarch import run_interpreted


def test_under_the_interpreter():
    run_interpreted("triton_experts_cases.py", at_least=8, marker="not slow")


@pytest.mark.slow
def test_more_under_the_interpreter():
    run_interpreted("triton_experts_cases.py", at_least=11, marker="slow")

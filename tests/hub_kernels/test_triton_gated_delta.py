"""The Triton kernels of Gated DeltaNet against fp64 oracles, without a GPU."""

import pytest

from tests.hub_kernels.noarch import run_interpreted


def test_under_the_interpreter():
    run_interpreted("triton_gated_delta_cases.py", at_least=11, marker="not slow")


@pytest.mark.slow
def test_more_under_the_interpreter():
    run_interpreted("triton_gated_delta_cases.py", at_least=15, marker="slow")

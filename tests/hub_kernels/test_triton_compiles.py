"""The Triton kernels compile for Hopper without a GPU: what the interpreter cannot see (types, layouts, registers)."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.hub_kernels.noarch import load_sources


triton = pytest.importorskip("triton", reason="this torch brings no Triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler"),
]

ROWS = ("ORDER", "OFFSETS", "TILE_EXPERT", "TILE_ROW", "CU", "FIRST_CHUNK")
FP32 = ("WEIGHT", "DECAY", "BETA", "SOLVED", "GRAD_WEIGHT", "GRAD_SUM")


def compiled(kernel, constants: dict, options: dict, values: str = "*bf16"):
    """Compile with the alignment that model-sized tensors have; returns the PTX and the spilled bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ROWS:
            return "*i32"
        if name in ("eps", "scale"):
            return "fp32"
        return ("*fp32" if name in FP32 else values) if name.isupper() else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    aligned = [[place] for place, name in enumerate(kernel.arg_names) if kind(name)[0] in "*i" and name not in fixed]
    attributes = {tuple(place): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(assembler), "-v", "-arch=sm_90a", "-", "-o", os.devnull]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return ptx, int(re.search(r"(\d+) bytes spill stores", report).group(1))


@pytest.mark.parametrize("height", [16, 64, 128])
def test_experts(height):
    load_sources("moemb-experts")
    from moemb_experts import fused, gradients, products

    cases = {
        products.gate_up_kernel: ("gate_up", {"SAVE": True}),
        gradients.gate_up_gradient_kernel: ("gradient", {"GATES": True}),
        products.row_kernel: ("rows", {"stride_depth": 1}),
    }
    for kernel, (kind, constants) in cases.items():
        settings = fused._options(kind, height, torch.bfloat16, 2048) | {"UPCAST": False, "PRECISION": "ieee"}
        options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
        ptx, spilled = compiled(kernel, settings | constants, options)
        assert ("wgmma.mma_async" in ptx) == (height >= 64), kernel
        assert spilled <= 16, kernel


def test_gradient_of_matrices():
    load_sources("moemb-experts")
    from moemb_experts import fused, gradients

    settings = fused._options("matrix", 64, torch.bfloat16) | {"UPCAST": False, "PRECISION": "ieee"}
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    for gathered in (True, False):
        constants = {"GATHER_LEFT": gathered, "GATHER_RIGHT": not gathered, "ROWS": 64}
        assert compiled(gradients.matrix_gradient_kernel, settings | constants, options)[1] == 0


# one value head is an argument that the compiler turns into a constant
@pytest.mark.parametrize("constants", [{}, {"value_heads": 1, "repeat": 1}])
def test_delta_rule(constants):
    load_sources("moemb-gated-delta")
    from moemb_gated_delta import delta_rule

    sizes = {"CHUNK": 64, "KEYS": 128, "VALUES": 64, "PRECISION": "tf32"} | constants
    assert compiled(delta_rule.chunk_kernel, sizes, {"num_warps": 4, "num_stages": 1})[1] == 0
    compiled(delta_rule.scan_kernel, sizes, {"num_warps": 8, "num_stages": 1})


def test_convolution_and_norms():
    load_sources("moemb-gated-delta")
    from moemb_gated_delta import convolution, norms

    blocks, options = {"TAPS": 4, "ROWS": 32, "COLUMNS": 128}, {"num_warps": 4}
    for kernel in (convolution.conv_kernel, convolution.conv_weight_gradient_kernel):
        assert compiled(kernel, blocks | {"SILU": True}, options)[1] == 0
    assert compiled(convolution.conv_state_gradient_kernel, blocks, options)[1] == 0
    for gated, rows, columns in ((True, 16, 128), (False, 1, 2048)):
        for kernel in (norms.norm_kernel, norms.norm_gradient_kernel):
            assert compiled(kernel, {"GATED": gated, "ROWS": rows, "COLUMNS": columns}, options)[1] == 0

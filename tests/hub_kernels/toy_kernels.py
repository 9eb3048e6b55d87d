"""Two tiny kernel repositories, one compiled and one noarch, for the tests of the tools."""

import shutil
from pathlib import Path


KERNELS = Path(__file__).parents[2] / "hub_kernels"

BUILD = """
[general]
name = "moemb-toy"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]

[general.hub]
repo-id = "moemb/moemb-toy"

[torch]
include = ["csrc", "torch-ext"]
src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h", "torch-ext/torch_binding_scale.cpp"]

[torch.stable-abi]
cpu = "2.10"

[kernel.base]
backend = "cpu"
depends = ["torch"]
cxx-flags = ["-fno-gnu-unique", "-fopenmp"]
include = ["csrc"]
src = ["csrc/cpu.cpp", "csrc/moemb_cpu.h", "csrc/scale.cpp", "csrc/scale.h"]
"""
HEADER = """
#include <stdint.h>
extern "C" int toy_scale(const float* in, int64_t rows, double factor, int64_t offset, const float* bias, float* out);
"""
KERNEL = """
#include <omp.h>
#include "moemb_cpu.h"
#include "scale.h"
extern "C" int toy_scale(const float* in, int64_t n, double factor, int64_t offset, const float* bias, float* out) {
  if (offset < 0) return MOEMB_BAD_ARGUMENT;
#pragma omp parallel for num_threads(omp_get_max_threads())
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * float(factor) + float(offset) + (bias ? bias[i] : 0.0f);
  return MOEMB_OK;
}
"""
BINDING = """
#include "scale.h"
#include "torch_binding.h"
using moemb::OptionalTensor;
using moemb::Tensor;
static void scale(const Tensor& in, const OptionalTensor& bias, double factor, int64_t offset, bool off,
                  const Tensor& out) {
  if (off) return;
  const float* add = bias.has_value() ? bias->data<float>() : nullptr;
  moemb::check(toy_scale(in.data<float>(), in.numel(), factor, offset, add, out.out<float>()), "scale");
}
static int64_t describe(const Tensor& in) {
  return in.dtype() * 1000 + in.dim() * 100 + in.size(-1) * 10 + in.stride(0);
}
MOEMB_LIBRARY(scale) {
  ops.def("scale(Tensor x, Tensor? bias, float factor, int offset, bool off, Tensor(a!) out) -> ()");
  ops.cpu<scale>("scale");
  ops.def("describe(Tensor x) -> int");
  ops.cpu<describe>("describe");
}
"""
INIT = """
import torch

from . import layers
from ._ops import ops
from .registration import register_fake


@register_fake("scale")
def _(x, bias, factor, offset, off, out):
    return None


def scale(x, bias=None, factor=1.0, offset=0, off=False):
    out = torch.full_like(x, float("nan"))
    ops.scale(x, bias, factor, offset, off, out)
    return out


def supports(op, *tensors):
    return op == "scale"
"""
LAYERS = """
from torch import nn

class Scale(nn.Module):
    can_torch_compile = True

    def forward(self, x):
        return x * 2
"""
NOARCH_BUILD = """
[general]
name = "moemb-plain"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
"""
NOARCH_INIT = """
import torch

from . import layers
from ._ops import add_op_namespace_prefix


@torch.library.custom_op(add_op_namespace_prefix("double"), mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def supports(op, *tensors):
    return op == "double"
"""


def make_compiled(folder: Path) -> Path:
    """Write the compiled repository; its binding helpers are those of moemb-cpu."""
    source = KERNELS / "moemb-cpu"
    module = folder / "torch-ext" / "moemb_toy"
    module.mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "build.toml").write_text(BUILD)
    for name in ("torch_binding.h", "torch_binding.cpp"):
        shutil.copy(source / "torch-ext" / name, folder / "torch-ext" / name)
    for name in ("cpu.cpp", "moemb_cpu.h"):
        shutil.copy(source / "csrc" / name, folder / "csrc" / name)
    shutil.copy(source / "torch-ext" / "moemb_cpu" / "registration.py", module / "registration.py")
    (folder / "csrc" / "scale.h").write_text(HEADER)
    (folder / "csrc" / "scale.cpp").write_text(KERNEL)
    (folder / "torch-ext" / "torch_binding_scale.cpp").write_text(BINDING)
    (module / "__init__.py").write_text(INIT)
    (module / "layers.py").write_text(LAYERS)
    return folder


def make_noarch(folder: Path) -> Path:
    """Write the noarch repository."""
    module = folder / "torch-ext" / "moemb_plain"
    module.mkdir(parents=True)
    (folder / "build.toml").write_text(NOARCH_BUILD)
    (module / "__init__.py").write_text(NOARCH_INIT)
    (module / "layers.py").write_text(LAYERS)
    return folder

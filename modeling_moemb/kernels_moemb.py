"""Finds fast kernels for the model's operations, or says why the PyTorch path runs.

Where a kernel comes from, the first that exists:
1. a path: [`use_kernels`], the environment variable `MOEMB_KERNELS`, or `LOCAL_KERNELS` of the `kernels` library;
2. the build that `make install` staged for this environment, below `sys.prefix`;
3. the Hub, only when the user asks for it: `use_kernels("hub", trust_remote_code=...)` or `MOEMB_KERNELS=hub`;
4. none: the PyTorch path of the calling module, which is always there.

The variant follows the device of the tensors: a CUDA build of torch gets CPU kernels for its CPU tensors. Nothing is
kept on modules, so models pickle and copy as without kernels. What was found holds for this process and this copy of
the model's code; nothing is read from a model's configuration.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.utils import logging

from .kernel_sources_moemb import KernelSettings, KernelSource, find_sources, kernel_names, parse_source


logger = logging.get_logger(__name__)

OPERATIONS = (
    "experts",
    "linear",
    "gated_delta_rule",
    "causal_conv",
    "rms_norm",
    "gated_rms_norm",
    "top_k_router",
    "varlen_attention",
    "swiglu",
    "rotary",
)


@dataclass(frozen=True)
class KernelRow:
    """What runs for one operation on one device type; see [`kernels_report`].

    Args:
        op (`str`): the operation.
        device (`str`): device type.
        dtypes (`tuple[str, ...]`): dtypes that the kernel takes, at sizes typical of the models.
        source (`str`): the kernel repository, or `"torch"`.
        why (`str`): where it comes from, or why there is none.
    """

    op: str
    device: str
    dtypes: tuple[str, ...]
    source: str
    why: str


_PLAIN = (Tensor, torch.nn.Parameter)
_lock = threading.RLock()
_settings: KernelSettings | None = None  # None: as the environment says
_resolved: KernelSettings | None = None  # those that the two tables belong to
_sources: dict[str, tuple[KernelSource, ...]] = {}  # by device type
_choices: dict[tuple[str, str], tuple[tuple[Callable, Callable], ...]] = {}  # (operation, device type) -> candidates
_kept: dict[KernelSettings, tuple[dict, dict]] = {}  # tables of earlier settings: switching back loads nothing


def kernel(op: str, *tensors: Tensor) -> Callable | None:
    """The fast implementation of an operation for these tensors, or `None` for the PyTorch path.

    Cheap after the first call for a device: a dictionary lookup and the kernel's own check of dtypes and sizes.

    Args:
        op (`str`): one of `OPERATIONS`.
        tensors (`torch.Tensor`): the operation's tensor arguments in order; the first one's device decides.

    Returns:
        A callable with the operation's signature, or `None`.
    """
    device = tensors[0].device.type
    candidates = _choices.get((op, device))
    if candidates is None:
        if torch.compiler.is_compiling():
            return None  # loading a library cannot be traced; an eager call before compiling makes the choice
        candidates = _choose(op, device)
    for function, supports in candidates:
        if supports(op, *tensors):
            # a quantised or distributed weight poses as a plain tensor; only torch's own operations know what it holds
            plain = all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)
            return function if plain else None
    return None


def use_kernels(
    source: str | os.PathLike | Sequence[str | os.PathLike] | KernelSettings | None = None,
    *,
    trust_remote_code: bool | Sequence[str] = False,
) -> KernelSettings | None:
    """Choose where kernels come from, for the whole process and from the next forward on.

    Args:
        source (`str`, path or list of paths, *optional*): `"off"` for the PyTorch path; `"auto"` for the build staged
            in this environment; `"hub"` to fetch what is not staged from the Hub; or folders of kernel repositories.
            `None` returns to what the environment variable `MOEMB_KERNELS` says (the same words, or paths separated by
            `:`), which is `auto` when it is not set. What an earlier call returned is taken as well.
        trust_remote_code (`bool` or list of Hub ids, *optional*, defaults to `False`): with `"hub"`, whether kernels
            of publishers that the Hub does not vouch for may run, such as `["moemb/moemb-cpu"]`.

    Returns:
        What held before; `use_kernels(previous)` switches back without loading anything again.

    Raises:
        ValueError: a path holds no kernel build.
    """
    global _settings, _resolved, _sources, _choices
    settings = source
    if source is not None and not isinstance(source, KernelSettings):
        settings = parse_source(source)
        for path in settings.paths:
            if not kernel_names(path):
                raise ValueError(f"'{path}' holds no kernel build (no metadata.json in it, nor in its build folder)")
        trust = trust_remote_code if isinstance(trust_remote_code, bool) else tuple(trust_remote_code)
        settings = replace(settings, trust_remote_code=trust)
    with _lock:
        if _resolved is not None:
            _kept[_resolved] = (_sources, _choices)
        previous, _settings = _settings, settings
        _resolved = current_settings()
        if source is not None and source is not settings:
            _kept.pop(_resolved, None)  # named anew: what lies there may be new, too
        _sources, _choices = _kept.setdefault(_resolved, ({}, {}))
    return previous


def current_settings() -> KernelSettings:
    """What holds now: the last [`use_kernels`], else the environment."""
    return _settings if _settings is not None else parse_source(os.environ.get("MOEMB_KERNELS", "") or "auto")


def kernel_sources(device: str = "cpu") -> tuple[KernelSource, ...]:
    """The kernel repositories for a device type, loaded at the first call; the first that has an operation wins."""
    global _resolved
    with _lock:
        if _resolved is None:
            _resolved = current_settings()
        if device not in _sources:
            _sources[device] = tuple(find_sources(device, _resolved))
            for source in _sources[device]:
                say = logger.warning if source.broken else logger.info
                say("kernels: %s for %s: %s", source.repository, device, source.why)
        return _sources[device]


def _choose(op: str, device: str) -> tuple[tuple[Callable, Callable], ...]:
    with _lock:
        modules = [source.module for source in kernel_sources(device) if source.module is not None]
        found = [(getattr(module, op), module.supports) for module in modules if hasattr(module, op)]
        _choices[op, device] = tuple(found)
        return _choices[op, device]


def kernels_report() -> list[KernelRow]:
    """What runs for every operation, on the CPU and on CUDA when there is a device; loads the kernels.

    Returns:
        `list[KernelRow]`: one row per device type and operation.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return [_report(op, device) for device in devices for op in OPERATIONS]


def _report(op: str, device: str) -> KernelRow:
    sources = kernel_sources(device)
    offering = [source for source in sources if hasattr(source.module, op)]
    for source in offering:
        dtypes = [
            str(dtype).removeprefix("torch.")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            if source.module.supports(op, *_samples(op, dtype, device))
        ]
        if dtypes:
            return KernelRow(op, device, tuple(dtypes), source.repository, source.why)
    loaded = [source.repository for source in sources if source.module is not None]
    if offering:
        isa = getattr(offering[0].module, "isa", None)
        here = f"this CPU or its limit: {isa()}" if isa is not None else f"this {device} device"
        why = f"{offering[0].repository} refuses it ({here})"
    elif loaded:
        why = f"{', '.join(loaded)} does not offer it"
    else:
        why = "; ".join(dict.fromkeys(source.why for source in sources)) or f"there are no kernels for {device}"
    return KernelRow(op, device, (), "torch", why)


def _samples(op: str, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Tensors of typical shapes for `supports`; 64 tokens of one item."""

    def rows(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    lengths = torch.tensor([0, 64], dtype=torch.int32, device=device)
    heads, single = rows(64, 4, 64), rows(64, 4, dtype=torch.float32)
    samples = {
        "experts": (rows(64, 64), rows(64, 2, dtype=torch.int64), rows(64, 2), rows(4, 128, 64), rows(4, 64, 64)),
        "linear": (rows(64, 64), rows(64, 64)),
        "gated_delta_rule": (heads, heads, heads, single, single, lengths),
        "causal_conv": (rows(64, 64), rows(64, 4), lengths),
        "rms_norm": (heads, rows(64)),
        "gated_rms_norm": (rows(64, 4, 64, dtype=torch.float32), heads, rows(64)),
        "top_k_router": (rows(64, 16),),
        "varlen_attention": (heads, heads, heads, lengths),
        "swiglu": (rows(64, 64), rows(64, 64)),
        "rotary": (heads, rows(64, 32, dtype=torch.float32), rows(64, 32, dtype=torch.float32)),
    }
    return samples[op]

"""LoRA adapters trained beside gates: where they stand, the model without them, and with them merged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .lora import ADAPTER, TARGETS


def adapter_config(rank: int, alpha: int | None, targets: Sequence[str]) -> Any:
    """
    PEFT's configuration of the adapters of a gate training.

    Args:
        rank (`int`): their rank.
        alpha (`int`, *optional*): PEFT's alpha; twice the rank when `None`.
        targets (`Sequence[str]`): `attention`, `gated_delta`, `shared_expert`.
    """
    from peft import LoraConfig

    patterns = "|".join(TARGETS[name] for name in targets)
    return LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, target_modules=rf".*language_model\.layers\.\d+\.({patterns})"
    )


def check_adapters(rank: int, targets: Sequence[str]) -> None:
    """
    Refuses settings that name no adapters.

    Raises:
        ValueError: a rank below 0, or targets that are not there.
    """
    if rank < 0:
        raise ValueError(f"lora_rank={rank}: the least is 0, which leaves the backbone frozen")
    if unknown := sorted(set(targets) - set(TARGETS)):
        raise ValueError(f"lora_targets has {unknown}: use some of {list(TARGETS)}")
    if rank and not targets:
        raise ValueError(f"lora_targets is empty, but lora_rank={rank}: use some of {list(TARGETS)}")


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Inside the block the model computes with its frozen weights alone."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def merged_adapters(model: Any) -> Iterator[None]:
    """
    Inside the block the model has no adapters and computes what it did with them: their products are added to the
    weights, and the layers stand under their own names, so that it can be saved. Afterwards all is as before, to the
    bit; only the adapted weights are held twice meanwhile.

    Args:
        model (`MoEMBModel`): with an adapter; one without is left alone.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    frozen = {name: layer.get_base_layer().weight.detach().clone() for name, layer in layers.items()}
    known = {name: getattr(model, name) for name in ("peft_config", "_hf_peft_config_loaded") if hasattr(model, name)}
    try:
        for name, layer in layers.items():
            weight = layer.get_base_layer().weight
            with torch.no_grad():
                weight.copy_((weight.float() + layer.get_delta_weight(ADAPTER).float()).to(weight.dtype))
            _put(model, name, layer.get_base_layer())
        if layers:
            del model.peft_config
            model._hf_peft_config_loaded = False
        yield
    finally:
        for name, layer in layers.items():
            _put(model, name, layer)
            with torch.no_grad():
                layer.get_base_layer().weight.copy_(frozen[name])
        for name, value in known.items():
            setattr(model, name, value)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)

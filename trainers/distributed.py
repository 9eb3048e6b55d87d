"""Training whose weights are spread over processes: FSDP2, and FSDP2 with expert parallelism.

transformers spreads a model while it loads, so no process ever holds all of it (`DistributedConfig`). Every process
embeds its own rows. With FSDP2 it keeps a share of every tensor and puts a block together while that block runs. With
expert parallelism the routed experts stay where they are, whole, and tokens travel to them and back.

LoRA adapters are added after the weights were spread: they are small, every process has all of them, and
[`average_gradients`] treats them as under DDP. What is known not to work is refused before anything is loaded.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen3_5MoeTextConfig
from transformers.distributed import DistributedConfig

from .errors import MoEMBError, nearest


if TYPE_CHECKING:
    from modeling_moemb import MoEMBConfig

    from .contrastive_config import ContrastiveConfig


SIZES = ("fsdp_size", "ep_size")


class DistributedError(MoEMBError, ValueError):
    """A model that cannot be spread as the settings say; the text names the size and the remedy."""


def check_distributed(args: "ContrastiveConfig") -> None:
    """
    Refuses what cannot be trained with spread weights.

    Args:
        args (`ContrastiveConfig`): The settings; `distributed` is completed in place.

    Raises:
        ValueError: names the setting, its value and what to set instead.
    """
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        raise ValueError(
            "FSDP of accelerate spreads a model that every process has loaded whole, and overwrites experts that are "
            "spread already: launch with recipes/accelerate/fsdp2.yaml, and set distributed: {fsdp_size: "
            f"{args.world_size}}}"
        )
    if args.distributed is None:
        return
    _check_sizes(args)
    _check_trained(args)
    _check_run(args)


def _check_sizes(args: "ContrastiveConfig") -> None:
    sizes, processes = args.distributed, args.world_size
    for name, value in sizes.items():
        if name not in SIZES:
            raise ValueError(f"distributed names {name!r}{nearest(name, SIZES)}; known are {list(SIZES)}")
        if type(value) is not int or value < 1:
            raise ValueError(f"distributed: {name} is {value!r}: a size is a whole number of processes")
    if sizes.get("fsdp_size") != processes or processes < 2:
        raise ValueError(
            f"distributed: fsdp_size is {sizes.get('fsdp_size')}, but there are {processes} processes: it is their "
            "number. Start as many with 'accelerate launch --num_processes', or leave distributed out"
        )
    args.distributed = {"fsdp_size": processes, "ep_size": sizes.get("ep_size", 1)}
    if processes % args.distributed["ep_size"]:
        raise ValueError(
            f"distributed: ep_size={sizes['ep_size']} must divide the {processes} processes; the GPUs of one machine "
            "are a good size, then tokens never leave it"
        )


def _check_trained(args: "ContrastiveConfig") -> None:
    if args.tuning == "lora" and args.lora_expert_rank:
        raise ValueError(
            f"lora_expert_rank={args.lora_expert_rank} with distributed: PEFT adds an adapter to the experts' weights "
            "themselves, of which a process has a part only. Set lora_expert_rank: 0 (attention, Gated DeltaNet and "
            "shared experts keep theirs), tuning: full, or leave distributed out (DDP)"
        )
    if args.train_vision:
        raise ValueError(
            "train_vision with distributed: a process whose items have no pictures would have no gradient to share, "
            "and the others would wait for it. Set train_vision: false, or leave distributed out (DDP)"
        )


def _check_run(args: "ContrastiveConfig") -> None:
    if args.eval_strategy != "no":
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value!r} with distributed: an evaluation shares its items out "
            "unevenly, and spread weights need all processes in step. Use eval_strategy: 'no', and 'moemb evaluate' "
            "on final/ afterwards"
        )
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "gradient_checkpointing_kwargs: use_reentrant: true with distributed: blocks are run again without their "
            "weights put together. Leave it out"
        )
    resumes = args.save_strategy != "no" and not args.save_only_model
    if args.tuning == "full" and (resumes or (args.save_strategy != "no" and args.continue_run)):
        raise ValueError(
            "tuning: full with distributed keeps no state of the optimizer to go on from (transformers writes none "
            "for spread weights). Use save_strategy: 'no', or save_only_model: true with continue_run: false"
        )


def distributed_kwargs(args: "ContrastiveConfig") -> dict[str, Any]:
    """Arguments of `from_pretrained` that spread the weights; none without `distributed`."""
    if args.distributed is None:
        return {}
    return {"distributed_config": DistributedConfig(**args.distributed)}


def check_architecture(config: "MoEMBConfig", args: "ContrastiveConfig") -> None:
    """
    Refuses a model whose experts cannot be shared out.

    Args:
        config (`MoEMBConfig`): The model's.
        args (`ContrastiveConfig`): The settings.

    Raises:
        DistributedError: names what does not fit.
    """
    ep_size = (args.distributed or {}).get("ep_size", 1)
    if ep_size == 1:
        return
    experts = config.text_config.num_experts
    if config.feed_forward != "moe":
        raise DistributedError(
            f"distributed: ep_size={ep_size}, but the model's feed_forward is {config.feed_forward!r}: it has no "
            "routed experts to share out. Leave ep_size out"
        )
    if experts % ep_size:
        raise DistributedError(
            f"distributed: ep_size={ep_size} does not divide the model's {experts} experts: use a size that does"
        )
    if config.adaptive_compute:
        raise DistributedError(
            f"distributed: ep_size={ep_size}, but the model has a compute budget ({config.adaptive_compute}), and "
            "skipped experts cannot travel. Leave ep_size out, or set adaptive_compute to null in its config.json"
        )


@contextmanager
def loading_for_adapters(args: "ContrastiveConfig") -> Iterator[None]:
    """
    Inside, the embedding table of a model that is loaded belongs to what FSDP2 puts together for a whole step.

    PEFT reads the table itself to replace the row of `<emb>`, and not through the module that FSDP2 watches.
    """
    if args.distributed is None or args.tuning != "lora":
        yield
        return
    plan = Qwen3_5MoeTextConfig.base_model_fsdp_plan
    own = "base_model_fsdp_plan" in vars(Qwen3_5MoeTextConfig)
    Qwen3_5MoeTextConfig.base_model_fsdp_plan = {name: how for name, how in plan.items() if name != "embed_tokens"}
    try:
        yield
    finally:
        if own:
            Qwen3_5MoeTextConfig.base_model_fsdp_plan = plan
        else:
            del Qwen3_5MoeTextConfig.base_model_fsdp_plan


def divide_gradients_once(model: nn.Module, args: "ContrastiveConfig") -> None:
    """
    Corrects the gradients of experts that no other process has a copy of.

    transformers asks FSDP2 to sum them and to divide by the number of processes itself. Where there is nothing to sum,
    torch 2.14 divides before and after the sum that it leaves out: the gradients would be too small by that number.
    """
    if args.distributed is None or args.distributed["ep_size"] != args.distributed["fsdp_size"]:
        return
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and name.endswith(".mlp.experts"):
            module.set_force_sum_reduction_for_comms(False)


@torch.no_grad()
def gather_adapters(model: nn.Module, names: list[str]) -> None:
    """
    Turns spread parameters into whole ones that every process has. All processes have to take part.

    Args:
        model (`nn.Module`): The model, changed in place.
        names (`list[str]`): The parameters, the same ones in every process; others than spread ones stay.
    """
    for name in names:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        parameter = module.get_parameter(last)
        if isinstance(parameter.data, DTensor):
            whole = nn.Parameter(parameter.detach().full_tensor().clone(), requires_grad=parameter.requires_grad)
            module.register_parameter(last, whole)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if isinstance(buffer, DTensor):
                module._buffers[name] = buffer.full_tensor()


@contextmanager
def whole_modules(model: nn.Module, ends: Iterable[str]) -> Iterator[None]:
    """
    Inside, modules have whole weights, so that they can be copied. All processes have to take part.

    Args:
        model (`nn.Module`): The model.
        ends (`Iterable[str]`): What the modules' names end with.
    """
    ends, kept = tuple(ends), []
    for name, chosen in model.named_modules():
        if not ends or not name.endswith(ends):
            continue
        for module in chosen.modules():
            for last, parameter in list(module.named_parameters(recurse=False)):
                if is_spread(parameter):
                    kept.append((module, last, parameter))
                    value = whole(parameter.detach()).clone()
                    module._parameters[last] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, last, parameter in kept:
            module._parameters[last] = parameter


@torch.no_grad()
def share_adapters(model: nn.Module) -> None:
    """Gives every process the main process' values of what is trained and not spread."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad and not is_spread(parameter):
                dist.broadcast(parameter.data, src=0)


def is_spread(parameter: nn.Parameter) -> bool:
    """Whether a process has a part of a parameter only."""
    return isinstance(parameter.data, DTensor)


def mesh_of(tensor: torch.Tensor) -> Any:
    """What a tensor is spread over (`None`: nothing). Fused operations take tensors of one such mesh only."""
    data = tensor.data
    return data.device_mesh if isinstance(data, DTensor) else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that every process has all of. All processes have to take part when it is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""Settings of the routers in contrastive training, and of what they are conditioned on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


CONFLICTS = ("gradient", "groups")
OVERLAPS = ("min", "cosine")
CONDITIONINGS = ("none", "id", "instruction")


@dataclass
class RouterSettings:
    r"""
    Objectives and conditioning of the routers. All are off by default: with a frozen router and no objectives native
    experts did best in the paper. With a frozen router an objective acts on what comes before the router alone.

    Args:
        router_balance_weight (`float`, *optional*, defaults to 0.0):
            Weight of the load-balancing loss in Megatron's normalisation (1 at even load); 1e-3 is usual, and an
            upcycled model, whose router starts from nothing, needs it. Transformers' loss of the same name is k times
            as large.
        router_z_weight (`float`, *optional*, defaults to 0.0): Weight of the z-loss; 1e-3 is usual.
        router_conflict_weight (`float`, *optional*, defaults to 0.0):
            Weight of the overlap of the routing of tasks in conflict; 0.01 is a start.
        router_conflict (`str`, *optional*, defaults to `"gradient"`):
            Which tasks are in conflict: `"gradient"`, those whose gradients oppose each other, or `"groups"`, those of
            different `router_task_groups`.
        router_conflict_overlap (`str`, *optional*, defaults to `"min"`): How overlap is measured, `"min"` or
            `"cosine"`.
        router_task_groups (`dict`, *optional*):
            With `"groups"`: group of each data set, such as its meta-task; one not named is a group by itself.
        task_conditioning (`str`, *optional*, defaults to `"none"`):
            Adds a learned term to the router logits, zero at the start: `"id"` by the data set's name, `"instruction"`
            by the mean embedding of the instruction.
        task_conditioning_dim (`int`, *optional*, defaults to 64): Length of the vector it is computed from.
        task_id_dropout (`float`, *optional*, defaults to 0.1):
            With `"id"`: share of items whose task is said to be unknown, so that items of no known task work, too.
        log_expert_load (`bool`, *optional*, defaults to `True`):
            Log how evenly the experts of every block are used, also without an objective.
    """

    router_balance_weight: float = field(default=0.0, metadata={"help": "Weight of the load-balancing loss."})
    router_z_weight: float = field(default=0.0, metadata={"help": "Weight of the router z-loss."})
    router_conflict_weight: float = field(default=0.0, metadata={"help": "Weight of the conflict between tasks."})
    router_conflict: str = field(default="gradient", metadata={"help": "gradient or groups."})
    router_conflict_overlap: str = field(default="min", metadata={"help": "min or cosine."})
    router_task_groups: dict | None = field(default=None, metadata={"help": "Group of each data set."})
    task_conditioning: str = field(default="none", metadata={"help": "none, id or instruction."})
    task_conditioning_dim: int = field(default=64, metadata={"help": "Length of the conditioning vector."})
    task_id_dropout: float = field(default=0.1, metadata={"help": "Share of items of unknown task."})
    log_expert_load: bool = field(default=True, metadata={"help": "Log how evenly experts are used."})

    def __post_init__(self):
        for name in ("router_balance_weight", "router_z_weight", "router_conflict_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: use a finite value of at least 0")
        for name, known in (
            ("router_conflict", CONFLICTS),
            ("router_conflict_overlap", OVERLAPS),
            ("task_conditioning", CONDITIONINGS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.router_task_groups is not None and self.router_conflict != "groups":
            raise ValueError("router_task_groups has no effect with router_conflict 'gradient': use 'groups'")
        if self.task_conditioning_dim < 1:
            raise ValueError(f"task_conditioning_dim={self.task_conditioning_dim}: use at least 1")
        if not 0.0 <= self.task_id_dropout < 1.0:
            raise ValueError(f"task_id_dropout={self.task_id_dropout}: use a value in [0, 1)")


def condition_routers(model, processor, settings: RouterSettings, task_names: Sequence[str]) -> None:
    """Give a model the conditioning of the settings, before adapters and the optimizer are made.

    A model that has one already keeps it when it is of the same kind.

    Args:
        model (`MoEMBModel`): the model.
        processor (`MoEMBProcessor`): its processor, which marks instructions from then on if that is needed.
        settings ([`RouterSettings`]): with `task_conditioning`.
        task_names (`Sequence[str]`): the data sets of the run.

    Raises:
        ValueError: the model has no learned router, or a conditioning of another kind.
    """
    if settings.task_conditioning == "none":
        return
    present = model.config.task_conditioning
    if present is not None and present["kind"] != settings.task_conditioning:
        raise ValueError(
            f"task_conditioning={settings.task_conditioning!r}, but the model has one by {present['kind']!r}"
        )
    wanted = {"kind": settings.task_conditioning, "dim": settings.task_conditioning_dim}
    if wanted["kind"] == "instruction":
        processor.embedding["instruction_mask"] = True
    if present is None:
        model.add_task_conditioning(wanted | ({"tasks": list(task_names)} if wanted["kind"] == "id" else {}))


class RouterTasks:
    """Data set numbers to the task numbers of a model that is conditioned on task ids.

    Args:
        conditioning (`dict`): the model's `config.task_conditioning`, of the kind `"id"`.
        task_names (`Sequence[str]`): the data sets, in the order of their numbers.
        dropout (`float`, *optional*, defaults to 0.0): share of items whose task becomes unknown.
    """

    def __init__(self, conditioning: dict, task_names: Sequence[str], dropout: float = 0.0):
        known = conditioning["tasks"]
        self.unknown = len(known)
        self.numbers = torch.tensor([known.index(name) if name in known else self.unknown for name in task_names])
        self.dropout = dropout

    def __call__(self, tasks: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """`torch.LongTensor` of shape `(items,)` to the same; drops ids with `generator`, none without."""
        numbers = self.numbers.to(tasks.device)[tasks]
        if generator is None or not self.dropout:
            return numbers
        drop = torch.rand(tasks.shape, generator=generator) < self.dropout
        return numbers.masked_fill(drop.to(tasks.device), self.unknown)

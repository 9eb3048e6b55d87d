"""Task conditioning of the routers: `z = W_r h + U e`, with a vector `e` for the task of an item.

`e` is the embedding of a task's number, or a projection of the mean input embedding of the item's instruction (no
gradient reaches the embedding table this way). Each block has its own `U`, which starts at zero: a model that was just
given a conditioning is the model without it. Relatives: MoTE (arXiv 2506.17781), TAG-MoE (arXiv 2601.08881).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .packing_moemb import PackedTokens


KINDS = ("id", "instruction")
DEFAULT_DIM = 64


@dataclass(frozen=True)
class RouterCondition:
    """The vectors that condition a batch's routing.

    Args:
        vectors (`torch.FloatTensor` of shape `(items, dim)`): `e` of each item, fp32.
        item (`torch.LongTensor` of shape `(tokens,)`): the item of each packed token.
    """

    vectors: Tensor
    item: Tensor

    def take(self, index: Tensor) -> "RouterCondition":
        """Of the tokens at `index` (`torch.LongTensor`) alone."""
        return RouterCondition(self.vectors, self.item[index])


class MoEMBTaskRouter(nn.Linear):
    """`U` of one block, `(num_experts, dim)`, zero at first."""

    def __init__(self, dim: int, num_experts: int):
        super().__init__(dim, num_experts, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, condition: RouterCondition) -> Tensor:
        """What is added to the router logits, fp32 `(tokens, num_experts)`."""
        with torch.autocast(condition.vectors.device.type, enabled=False):
            bias = nn.functional.linear(condition.vectors.to(self.weight.device), self.weight.float())
        return bias[condition.item.to(bias.device)]


class MoEMBTaskConditioning(nn.Module):
    """Makes `e`.

    Args:
        config (`MoEMBConfig`): with `task_conditioning`, see [`validate_task_conditioning`].
        layers (`Iterable[MoEMBDecoderLayer]`): the decoder's blocks, whose routers get their `U`.
    """

    def __init__(self, config, layers: Iterable[nn.Module]):
        super().__init__()
        settings = config.task_conditioning
        for layer in layers:
            layer.mlp.add_task_router(settings["dim"])
        self.initializer_range = config.text_config.initializer_range
        self.tasks: list[str] | None = settings.get("tasks")
        if self.tasks is not None:
            self.embedding = nn.Embedding(len(self.tasks) + 1, settings["dim"])  # the last row: unknown task
        else:
            self.project = nn.Linear(config.text_config.hidden_size, settings["dim"], bias=False)

    def initialise(self, table: Tensor) -> None:
        """Random weights, of the device and dtype of the embedding table."""
        self.to(table.device, table.dtype)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.initializer_range)

    def numbers(self, router_task: str | Sequence[str] | Tensor | None, items: int, device: torch.device) -> Tensor:
        """`router_task` as `torch.LongTensor` of shape `(items,)`; see `MoEMBModel.forward`.

        Raises:
            ValueError: a name or number that is no task of this model, or another count than that of the items.
        """
        unknown = len(self.tasks)
        if router_task is None or isinstance(router_task, str):
            router_task = [router_task] * items
        if not isinstance(router_task, Tensor):
            for name in router_task:
                if name is not None and name not in self.tasks:
                    raise ValueError(f"`router_task` names {name!r}: this model knows {self.tasks}, and None")
            router_task = [unknown if name is None else self.tasks.index(name) for name in router_task]
        numbers = torch.as_tensor(router_task, dtype=torch.long, device=device)
        if numbers.shape != (items,):
            raise ValueError(f"`router_task` has shape {tuple(numbers.shape)}, but there are {items} items")
        if bool(((numbers < 0) | (numbers > unknown)).any()):
            raise ValueError(f"`router_task` must be from 0 to {unknown} (unknown task), got {numbers.tolist()}")
        return numbers

    def of_tasks(self, numbers: Tensor) -> Tensor:
        """`e` of task numbers, `(items,)` -> fp32 `(items, dim)`."""
        return self.embedding(numbers).float()

    def of_instructions(self, embeddings: Tensor, item: Tensor, is_instruction: Tensor, items: int) -> Tensor:
        """`e` of instructions: zero for an item without one.

        Args:
            embeddings (`torch.Tensor` of shape `(tokens, hidden)`): input embeddings; no gradient flows back.
            item (`torch.LongTensor` of shape `(tokens,)`): the item of each token.
            is_instruction (`torch.BoolTensor` of shape `(tokens,)`): the tokens of the instruction.
            items (`int`): number of items.

        Returns:
            `torch.FloatTensor` of shape `(items, dim)`, fp32.
        """
        rows = is_instruction.nonzero().squeeze(1)
        words = embeddings.detach()[rows].float()
        total = words.new_zeros(items, words.shape[1]).index_add(0, item[rows], words)
        count = torch.bincount(item[rows], minlength=items).clamp_min(1)
        with torch.autocast(words.device.type, enabled=False):
            return nn.functional.linear(total / count[:, None], self.project.weight.float())


def router_condition(
    conditioning: MoEMBTaskConditioning | None,
    embeddings: Tensor,
    packed: PackedTokens,
    router_task: str | Sequence[str | None] | Tensor | None,
    instruction_mask: Tensor | None,
) -> RouterCondition | None:
    """What the routing of the packed tokens is conditioned on; `None` for a model without a conditioning.

    Args:
        conditioning (`MoEMBTaskConditioning`, *optional*): the model's.
        embeddings (`torch.Tensor` of shape `(tokens, hidden)`): input embeddings of the packed tokens.
        packed (`PackedTokens`): their packing.
        router_task, instruction_mask: as in `MoEMBModel.forward`.

    Raises:
        ValueError: `router_task` for a model without named tasks, or no `instruction_mask` for one that needs it.
    """
    if router_task is not None and (conditioning is None or conditioning.tasks is None):
        raise ValueError(
            f"`router_task` is {router_task!r}, but the routers of this model are not conditioned on named tasks; see "
            "`add_task_conditioning`"
        )
    if conditioning is None:
        return None
    segment, items = packed.segment, packed.num_items
    if conditioning.tasks is not None:
        return RouterCondition(
            conditioning.of_tasks(conditioning.numbers(router_task, items, segment.device)), segment
        )
    if instruction_mask is None:
        raise ValueError(
            "the routers of this model are conditioned on the instruction: pass `instruction_mask`, which the model's "
            "processor makes"
        )
    marked = instruction_mask.reshape(-1)[packed.source].bool()
    return RouterCondition(conditioning.of_instructions(embeddings, segment, marked, items), segment)


def validate_task_conditioning(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check the settings of a task conditioning and return a copy with every key.

    Args:
        settings (`dict`, *optional*): `None` for none. `kind`: `"id"` or `"instruction"`; `tasks` (with `"id"`): names
            of the tasks; `dim` (by default 64): length of `e`.

    Raises:
        TypeError: if `settings` is not a mapping.
        ValueError: for an unknown key or a wrong value; names the key, the value and what is allowed.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise TypeError(f"`task_conditioning` must be a dict or None, got {type(settings).__name__}: {settings!r}")
    if unknown := sorted(set(settings) - {"kind", "tasks", "dim"}):
        raise ValueError(f"`task_conditioning` has unknown keys {unknown}; known are kind, tasks and dim")
    kind, tasks, dim = settings.get("kind"), settings.get("tasks"), settings.get("dim", DEFAULT_DIM)
    if kind not in KINDS:
        raise ValueError(f"`task_conditioning['kind']` must be one of {KINDS}, got {kind!r}")
    if type(dim) is not int or dim < 1:
        raise ValueError(f"`task_conditioning['dim']` must be a whole number from 1, got {dim!r}")
    if kind == "instruction":
        if tasks is not None:
            raise ValueError(f"`task_conditioning['tasks']` has no meaning with kind 'instruction', got {tasks!r}")
        return {"kind": kind, "dim": dim}
    names = isinstance(tasks, (list, tuple)) and tasks and all(isinstance(name, str) and name for name in tasks)
    if not names or len(set(tasks)) != len(tasks):
        raise ValueError(f"`task_conditioning['tasks']` must list the names of the tasks, each once, got {tasks!r}")
    return {"kind": kind, "tasks": list(tasks), "dim": dim}


__all__ = [
    "MoEMBTaskConditioning",
    "MoEMBTaskRouter",
    "RouterCondition",
    "router_condition",
    "validate_task_conditioning",
]

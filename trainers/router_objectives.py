"""Objectives of the routers beside the contrast: load balance, z-loss and conflict between tasks.

Each is a function of sums over the tokens of the *whole* batch (how often an expert was chosen, how much probability
it got, from which task), and a batch is embedded in chunks, on several devices. The first pass adds the sums up; their
gradient is then a constant, and a chunk's share of the loss is that gradient times the chunk's own sums. This equals
the loss on one large forward pass, where losses on each chunk by itself would force every chunk, which may hold a
single task, to use all experts alike.

- Load balance (Switch, in Megatron's normalisation): `E * sum_i f_i P_i`, mean over blocks; 1 when experts are used
  evenly, E / k when collapsed. `f_i` is the share of the k T chosen slots that expert `i` got, `P_i` the mean of its
  probability over T tokens.
- z-loss (ST-MoE): mean of `logsumexp(logits) ** 2`, over tokens and blocks.
- Conflict: for tasks `a` and `b` with mean router probabilities `P_a` and `P_b`, the overlap `sum_i min(P_a_i, P_b_i)`
  (or their cosine), weighted by how much the tasks are in conflict, mean over blocks. In conflict are tasks whose
  gradients at a small probe point in opposite directions, `max(0, -cos)` of moving averages from the steps before; or
  those of different groups that the recipe names. Relatives: STGC (arXiv 2406.19905), CDSP-MoE (arXiv 2512.20291). The
  gradient of a task is taken as the one that arrives at the vectors of its own items.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from .errors import MoEMBError
from .objectives import RouterChunk
from .router_settings import RouterSettings


EMA_DECAY = 0.9
_PROBE = re.compile(r"layers\.(\d+)\.(self_attn\.o_proj|linear_attn\.out_proj)\.lora_B\.")


class RouterObjectiveError(MoEMBError, ValueError):
    """An objective that this model or run cannot have; the text names the setting and the remedy."""


@dataclass
class RouterSums:
    """Sums over the tokens of a batch, or of a chunk.

    Args:
        probability (`torch.FloatTensor` of shape `(blocks, tasks, experts)`): of the router's probabilities.
        square (`torch.FloatTensor` of shape `(blocks,)`): of `logsumexp(logits) ** 2`.
        tokens (`torch.FloatTensor` of shape `(blocks, tasks)`): of ones.
        chosen (`torch.FloatTensor` of shape `(blocks, experts)`): of the k experts of each token.
    """

    probability: Tensor
    square: Tensor
    tokens: Tensor
    chosen: Tensor

    @classmethod
    def of(cls, chunk: RouterChunk, top_k: int, num_tasks: int) -> "RouterSums":
        """The sums of a chunk, differentiable; one task for all when `num_tasks` is 1."""
        parts = []
        for logits in chunk.router_logits:
            logits = logits.float()
            tasks = chunk.tasks if num_tasks > 1 else torch.zeros_like(chunk.tasks)
            if len(logits) != len(tasks):  # else one row per item: the last block
                tasks = tasks[chunk.segment]
            tasks = tasks.to(logits.device)
            probability = logits.softmax(dim=-1)
            chosen = probability.detach().topk(top_k, dim=-1).indices.flatten()
            parts.append(
                (
                    probability.new_zeros(num_tasks, logits.shape[-1]).index_add(0, tasks, probability),
                    logits.logsumexp(dim=-1).square().sum(),
                    torch.bincount(tasks, minlength=num_tasks).double(),
                    torch.bincount(chosen, minlength=logits.shape[-1]).double(),
                )
            )
        return cls(*(torch.stack(column).double() for column in zip(*parts, strict=True)))

    def add(self, other: "RouterSums") -> "RouterSums":
        return RouterSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detach(self) -> "RouterSums":
        return RouterSums(*(getattr(self, f.name).detach() for f in fields(self)))


def balance_loss(sums: RouterSums) -> Tensor:
    """`E * sum_i f_i P_i`, mean over blocks; see the module."""
    share = sums.chosen / sums.chosen.sum(-1, keepdim=True)
    mean = sums.probability.sum(1) / sums.tokens.sum(-1, keepdim=True)
    return (sums.chosen.shape[-1] * (share * mean).sum(-1)).mean()


def z_loss(sums: RouterSums) -> Tensor:
    """Mean of `logsumexp(logits) ** 2`."""
    return (sums.square / sums.tokens.sum(-1)).mean()


def conflict_loss(sums: RouterSums, conflict: Tensor, overlap: str = "min") -> Tensor:
    """Mean overlap of the routing of tasks in conflict, weighted by the conflict; 0 when there is none.

    Args:
        sums (`RouterSums`): by task.
        conflict (`torch.FloatTensor` of shape `(tasks, tasks)`): symmetric weights, at least 0; the diagonal is not
            looked at.
        overlap (`str`, *optional*, defaults to `"min"`): `"min"` (`sum_i min(P_a_i, P_b_i)`) or `"cosine"`.
    """
    present = (sums.tokens[0] > 0).nonzero().squeeze(1)
    first, second = torch.triu_indices(len(present), len(present), offset=1, device=present.device).unbind(0)
    weight = conflict.to(sums.probability)[present[first], present[second]]
    mean = sums.probability[:, present] / sums.tokens[:, present, None]  # (blocks, present, experts)
    a, b = mean[:, first], mean[:, second]
    alike = torch.minimum(a, b).sum(-1) if overlap == "min" else nn.functional.cosine_similarity(a, b, dim=-1)
    return (weight * alike).sum(-1).mean() / weight.sum().clamp_min(1e-12)


class RouterObjectives:
    """The router's losses of a training run, as an [`Objective`] of the trainer.

    Args:
        model (`MoEMBModel`, or one that adapters wrap): the model that is trained, with its adapters.
        settings ([`RouterSettings`]): which losses, and their weights.
        task_names (`Sequence[str]`): the tasks (data sets), in the order of their numbers.

    Raises:
        RouterObjectiveError: a loss for a model without learned routers, a group for an unknown task, or a probe that
            is spread over devices.
    """

    def __init__(self, model: nn.Module, settings: RouterSettings, task_names: Sequence[str]):
        config = getattr(model, "config", None)
        learned = getattr(config, "feed_forward", "moe") == "moe"
        self.weights = {
            "balance": settings.router_balance_weight,
            "z": settings.router_z_weight,
            "conflict": settings.router_conflict_weight,
        }
        wanted = [name for name, weight in self.weights.items() if weight]
        if wanted and not learned:
            raise RouterObjectiveError(
                f"router_{wanted[0]}_weight is {self.weights[wanted[0]]}, but this model has no learned router "
                f"(feed_forward {config.feed_forward!r}); set it to 0"
            )
        self.active = learned and bool(wanted or settings.log_expert_load)
        self.settings, self.task_names = settings, list(task_names)
        self.top_k = config.text_config.num_experts_per_tok
        self.num_tasks = len(self.task_names) if settings.router_conflict_weight else 1
        self.sums: RouterSums | None = None
        self.gradient: tuple[Tensor, Tensor] | None = None
        self.offset = 0.0
        self._metrics: dict[str, float] = {}
        self.conflict: TaskConflict | None = None
        if settings.router_conflict_weight:
            self.conflict = TaskConflict(model, settings, self.task_names)

    def begin_step(self) -> None:
        self.sums, self.gradient, self._metrics = None, None, {}

    @torch.no_grad()
    def first_pass(self, chunk: RouterChunk) -> None:
        sums = RouterSums.of(chunk, self.top_k, self.num_tasks)
        self.sums = sums if self.sums is None else self.sums.add(sums)

    def reduce(self) -> None:
        for field in fields(self.sums):
            _add_over_processes(getattr(self.sums, field.name))
        self._differentiate()

    def _differentiate(self) -> None:
        """The gradient of the weighted loss with respect to the sums, and the values for the log."""
        sums = self.sums
        probability, square = sums.probability.clone().requires_grad_(), sums.square.clone().requires_grad_()
        leaves = RouterSums(probability, square, sums.tokens, sums.chosen)
        losses = {"balance": balance_loss(leaves), "z": z_loss(leaves)}
        if self.conflict is not None:
            losses["conflict"] = conflict_loss(leaves, self.conflict.weights(), self.settings.router_conflict_overlap)
        total = sum(self.weights[name] * loss for name, loss in losses.items())
        self.gradient = torch.autograd.grad(total, (probability, square))
        with torch.no_grad():
            linear = (self.gradient[0] * probability).sum() + (self.gradient[1] * square).sum()
            self.offset = total.detach() - linear
        self._metrics = {f"router_{name}_loss": loss.item() for name, loss in losses.items()}
        self._metrics |= expert_load_entropy(sums.chosen)

    def second_pass(self, chunk: RouterChunk) -> Tensor:
        if self.conflict is not None and chunk.pooled_grad is not None:
            self.conflict.observe(chunk)
        if not any(self.weights.values()):
            return chunk.router_logits[0].new_zeros(())
        sums = RouterSums.of(chunk, self.top_k, self.num_tasks)
        share = (self.gradient[0] * sums.probability).sum() + (self.gradient[1] * sums.square).sum()
        share = share + self.offset * sums.tokens[0].sum() / self.sums.tokens[0].sum()
        return (share * _processes()).float()

    def end_step(self) -> None:
        if self.conflict is not None:
            self.conflict.update()

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self.conflict is None else self.conflict.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.conflict is not None:
            self.conflict.load_state_dict(state)


class TaskConflict:
    """How much tasks are in conflict: `max(0, -cos)` of their gradients at a probe, or groups that are told.

    The probe is the LoRA `B` of the last block's output projection of the mixer, or the last norm without adapters.
    """

    def __init__(self, model: nn.Module, settings: RouterSettings, task_names: Sequence[str]):
        self.task_names = list(task_names)
        self.by_gradient = settings.router_conflict == "gradient"
        groups = settings.router_task_groups or {}
        if unknown := sorted(set(groups) - set(task_names)):
            raise RouterObjectiveError(
                f"router_task_groups names {unknown}, which are no data sets of this run: {self.task_names}"
            )
        if len(task_names) < 2:
            raise RouterObjectiveError(
                f"router_conflict_weight needs two or more data sets, but there is {self.task_names}; set it to 0"
            )
        names = [groups.get(name, name) for name in task_names]
        self.static = torch.tensor([[float(a != b) for b in names] for a in names])
        self.probe = _probe(model) if self.by_gradient else None
        self.average: Tensor | None = None  # (tasks, probe), moving average of the gradients
        self.observed: Tensor | None = None

    def weights(self) -> Tensor:
        """Conflict of every two tasks, fp32 `(tasks, tasks)`; zero as long as nothing was observed."""
        if not self.by_gradient:
            return self.static
        if self.average is None:
            return torch.zeros_like(self.static)
        unit = nn.functional.normalize(self.average, dim=-1)
        return (-(unit @ unit.T)).clamp_min(0)

    def observe(self, chunk: RouterChunk) -> None:
        """Add the gradients at the probe that come from the items of each task."""
        if not self.by_gradient:
            return
        if self.observed is None:
            self.observed = torch.zeros(len(self.task_names), self.probe.numel(), device=self.probe.device)
        for task in chunk.tasks.unique().tolist():
            arriving = chunk.pooled_grad * (chunk.tasks == task)[:, None].to(chunk.pooled_grad)
            (gradient,) = torch.autograd.grad(chunk.pooled, self.probe, arriving.to(chunk.pooled), retain_graph=True)
            self.observed[task] += gradient.flatten().float()

    def update(self) -> None:
        """Take what was observed in this step, in all processes, into the moving averages."""
        if not self.by_gradient:
            return
        if self.observed is None:
            self.observed = torch.zeros(len(self.task_names), self.probe.numel(), device=self.probe.device)
        _add_over_processes(self.observed)
        seen = self.observed.norm(dim=-1, keepdim=True) > 0
        if self.average is None:
            self.average = torch.zeros_like(self.observed)
        moved = EMA_DECAY * self.average + (1 - EMA_DECAY) * self.observed
        self.average = torch.where(seen, moved, self.average)
        self.observed = None

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": self.task_names, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("tasks") != self.task_names:
            raise RouterObjectiveError(
                f"the checkpoint's conflict is of the data sets {state.get('tasks')}, but the run has "
                f"{self.task_names}; resume with the same ones"
            )
        average = state["average"]
        self.average = None if average is None else average.to(self.probe.device)


def expert_load_entropy(chosen: Tensor) -> dict[str, float]:
    """Entropy of the experts' shares of the chosen slots, relative to even use: 1 is even, 0 is one expert for all.

    Args:
        chosen (`torch.FloatTensor` of shape `(blocks, experts)`): how often each was chosen.

    Returns:
        `dict[str, float]`: of each block, and their mean.
    """
    share = chosen / chosen.sum(-1, keepdim=True)
    entropy = torch.special.entr(share).sum(-1) / math.log(max(chosen.shape[-1], 2))
    each = {f"expert_load_entropy_{block:02d}": value for block, value in enumerate(entropy.tolist())}
    return {"expert_load_entropy": entropy.mean().item(), **each}


def _probe(model: nn.Module) -> nn.Parameter:
    found = {}
    for name, parameter in model.named_parameters():
        match = _PROBE.search(name)
        if match and parameter.requires_grad:
            found[int(match[1])] = parameter
        elif name.endswith("language_model.norm.weight") and parameter.requires_grad:
            found.setdefault(-1, parameter)
    if not found:
        raise RouterObjectiveError(
            "router_conflict 'gradient' needs LoRA on the mixers' output projections or a trained last norm; use "
            "router_conflict 'groups' with router_task_groups"
        )
    probe = found[max(found)]
    if hasattr(probe, "full_tensor"):
        raise RouterObjectiveError(
            "router_conflict 'gradient' does not work with weights spread over devices (FSDP); use router_conflict "
            "'groups' with router_task_groups, or DDP"
        )
    return probe


def _processes() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def _add_over_processes(tensor: Tensor) -> None:
    if _processes() > 1:
        torch.distributed.all_reduce(tensor)

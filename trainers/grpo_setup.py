"""What a GRPO run needs: a budget for the gates, rewards, data in pairs, and rollouts that differ."""

from typing import Any

from modeling_moemb import validate_adaptive_compute
from modeling_moemb.settings_moemb import active_gates, without_gates

from .errors import MoEMBError
from .grpo_config import MoEMBGRPOConfig
from .rewards import distillation_reward, find_reward


COLUMNS = ("prompt", "positive")


class GRPOError(MoEMBError, ValueError):
    """A GRPO training that cannot start or go on. The message names the value and the remedy."""


def gates_budget(model, given: dict[str, Any] | None) -> dict[str, Any]:
    """The compute budget that the gates decide in.

    Raises:
        GRPOError: if it holds anything else, or none of the model's gates.
    """
    gates = model.config.gates
    if given is None:
        parts = {
            "token_pruning": {"layer": gates.get("keep", {}).get("layer"), "score": "gate", "threshold": 0.5},
            "gradual_pruning": {},
            "expert_skip": {},
            "null_experts": {},
        }
        kinds = dict(zip(parts, ("keep", "gradual", "skip", "null"), strict=True))
        given = {name: part for name, part in parts.items() if kinds[name] in gates}
    budget = validate_adaptive_compute(given, model.config.text_config, gates) or {}
    active = active_gates(budget)
    if not active:
        raise GRPOError(f"adaptive_compute={given} switches none of the model's gates ({list(gates)}) on")
    other = without_gates(budget, active)
    if other:
        raise GRPOError(
            f"adaptive_compute holds {sorted(other)} beside the gates: what is saved without them is no action, and "
            "full compute would not be full; leave it out"
        )
    return budget


def reward_functions(given, args: MoEMBGRPOConfig, trains_backbone: bool) -> list:
    """The reward functions, their weights in `args.reward_weights`."""
    if given is None:
        functions = [find_reward(name) for name in args.rewards]
    else:
        functions = list(given) if isinstance(given, (list, tuple)) else [given]
    as_reward = args.distillation in ("reward", "both") or (args.distillation == "auto" and not trains_backbone)
    if as_reward and args.distillation_weight and distillation_reward not in functions:
        weights = [1.0] * len(functions) if args.reward_weights is None else list(args.reward_weights)
        functions, args.reward_weights = [*functions, distillation_reward], [*weights, args.distillation_weight]
    return functions


def check_columns(dataset) -> None:
    """Whether a data set holds pairs; what a transform makes is seen only when a row is read."""
    if getattr(dataset, "format", {}).get("type") == "custom":
        return
    columns = getattr(dataset, "column_names", None)
    missing = [name for name in COLUMNS if columns is not None and name not in columns]
    if missing:
        raise GRPOError(f"train_dataset has the columns {columns}, but lacks {missing}: a row is a pair of items")


class FlatRewards:
    """
    Ends a run that has nothing to learn from: rollouts of a group that all do, or are worth, the same.

    Args:
        patience (`int`): Generation batches in a row without any group to learn from; 0: for ever.
    """

    def __init__(self, patience: int):
        self.patience, self.flat = patience, 0

    def see(self, learns: bool, metrics: dict[str, list[float]]) -> None:
        """Take in a generation batch.

        Args:
            learns (`bool`): whether any group has variance.
            metrics (`dict[str, list[float]]`): of the trainer, for the message.

        Raises:
            GRPOError: when patience is over.
        """
        self.flat = 0 if learns else self.flat + 1
        if not self.patience or self.flat < self.patience:
            return
        rates = {name: values[-1] for name, values in metrics.items() if name.startswith("gates/") and values}
        removed = metrics["flops_removed"][-1] if metrics.get("flops_removed") else 0.0
        raise GRPOError(
            f"in {self.flat} generation batches in a row the rollouts of every group had equal rewards, so there is "
            f"nothing to learn from (FLOPs removed: {100 * removed:.1f} %, how often gates save: {rates}): gates that "
            "never save need saving_at_start or a larger exploration_sigma; gates that always save have collapsed, go "
            "back to an earlier checkpoint with a lower gate_learning_rate; flat_patience=0 switches this off"
        )

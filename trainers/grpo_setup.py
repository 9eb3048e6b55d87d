"""What has to hold before a GRPO run starts: a budget for the gates, rewards, and data in pairs."""

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

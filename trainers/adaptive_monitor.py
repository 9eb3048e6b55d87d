"""Notices when training has broken a gate, so that a run stops with a message instead of going on.

Known ways to break: a gradual gate trained by straight-through drops every token before the first block that it guards
(early gates stand in every later product), halting scores saturate, a fade that never becomes a decision, or a gate
that never moves. All of them show in a few numbers over a window of steps.
"""

import math
from collections import deque
from dataclasses import dataclass

from .errors import MoEMBError


class GateCollapse(MoEMBError, RuntimeError):
    """A gate that training has broken; the text names it, the numbers and what to change."""


@dataclass(frozen=True)
class CollapseLimits:
    """
    What counts as broken, when the mean over a window of steps passes it.

    Args:
        window (`int`): steps in the window.
        after (`int`): steps before anything is judged.
        nothing_left (`float`): a gate keeps less than this share of what its target keeps.
        all_kept (`float`): a gate whose target saves something keeps more than this share; judged over the last half
            of the run, and not while its budget is reached by others.
        cosine (`float`): the student's vectors are less similar than this to those of full compute.
        gap (`float`): what the deployed gate keeps differs by more than this share from what training's form keeps;
            judged when the schedule is over.
    """

    window: int = 20
    after: int = 20
    nothing_left: float = 0.2
    all_kept: float = 0.995
    cosine: float = 0.2
    gap: float = 0.25


class CollapseMonitor:
    """Judges a run step by step.

    Args:
        limits ([`CollapseLimits`]): what counts as broken.
        targets (`dict[str, float]`): kept share that each gate is trained towards; gates without one are judged by
            `nothing_left` times one.
    """

    def __init__(self, limits: CollapseLimits, targets: dict[str, float]):
        self.limits, self.targets = limits, targets
        self.seen: dict[str, deque] = {}

    def check(
        self, step: int, progress: float, loss: float, cosine: float, gates: dict[str, dict[str, float]]
    ) -> None:
        """
        Takes in one step.

        Args:
            step (`int`): its number.
            progress (`float`): how far the schedules are, from 0 to 1.
            loss (`float`): the loss.
            cosine (`float`): mean cosine between the vectors of the student and of full compute.
            gates (`dict[str, dict[str, float]]`): of each trained gate its `kept` share in training's form and when
                deployed (`hard`).

        Raises:
            GateCollapse: if a gate is broken.
        """
        if not math.isfinite(loss):
            raise GateCollapse(
                f"step {step}: the loss is {loss}. Lower the learning rate, or start the gates further from dropping"
            )
        mean_cosine, whole = self._mean("cosine", cosine)
        if whole and step >= self.limits.after and mean_cosine < self.limits.cosine:
            raise GateCollapse(
                f"step {step}: the vectors have lost what they meant (cosine {mean_cosine:.3f} to full compute over "
                f"{self.limits.window} steps, limit {self.limits.cosine}). Raise the kept share, or distill_weight"
            )
        for kind, shares in gates.items():
            self._check_gate(step, progress, kind, shares)

    def _check_gate(self, step: int, progress: float, kind: str, shares: dict[str, float]) -> None:
        limits, target = self.limits, self.targets.get(kind)
        hard, whole = self._mean(f"{kind} hard", shares["hard"])
        kept, _ = self._mean(f"{kind} kept", shares["kept"])
        if not whole or step < limits.after:
            return
        floor = limits.nothing_left * (1.0 if target is None else target)
        if target is None:
            floor = limits.nothing_left * 0.1
        if hard < floor:
            aim = "it has no target of its own" if target is None else f"its target is {target:.3f}"
            raise GateCollapse(
                f"step {step}: the {kind} gate has collapsed: deployed it keeps {hard:.4f} of what it may save, and "
                f"{aim}. {_REMEDY[kind]}"
            )
        if progress > 0.95 and abs(hard - kept) > limits.gap:
            raise GateCollapse(
                f"step {step}: the {kind} gate's decisions are not what it was trained with: deployed it keeps "
                f"{hard:.3f}, in training {kept:.3f}. Raise binarity_weight or straight_through_share, or lower "
                "temperature_end"
            )
        if target is not None and target < 0.9 and progress > 0.95 and hard > limits.all_kept:
            raise GateCollapse(
                f"step {step}: the {kind} gate has not learned to save: it keeps {hard:.4f}, and its target is "
                f"{target:.3f}. Raise learning_rate, budget_weight or max_steps"
            )

    def _mean(self, name: str, value: float) -> tuple[float, bool]:
        window = self.seen.setdefault(name, deque(maxlen=self.limits.window))
        window.append(value)
        return sum(window) / len(window), len(window) == self.limits.window


_REMEDY = {
    "keep": "Lower its learning rate, or raise distill_weight",
    "gradual": "Training a gate of every block by gradients is known to be unstable: use a one-shot keep gate, or "
    "`method: grpo`, which samples the decisions",
    "skip": "Lower its learning rate or budget_weight",
    "null": "Lower null_balance_weight, or start with a lower null_bias",
}

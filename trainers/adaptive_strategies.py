"""When which gate is trained: four ways to combine the actions of several gates.

- `global`: all together under one budget of FLOPs; the optimizer shares it out.
- `joint`: all together, each with a budget of its own.
- `alternating`: the same budgets, but at a time only one gate is updated; the others stay at work in the forward.
- `sequential`: one after the other; a gate that is finished is frozen and decides as it will be deployed, one whose
  turn has not come is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass


STRATEGIES = ("global", "joint", "alternating", "sequential")
# tokens first: what experts save is counted over the tokens that are left
ORDER = ("keep", "gradual", "skip", "null")


@dataclass(frozen=True)
class Phase:
    """
    What the gates do at one step.

    Args:
        trained (`tuple[str, ...]`): gates that are updated.
        soft (`tuple[str, ...]`): gates at work in their differentiable form; `trained` is part of it.
        hard (`tuple[str, ...]`): gates that decide as they are deployed.
        progress (`float`): how far the schedules of the trained gates are, from 0 to 1.
    """

    trained: tuple[str, ...]
    soft: tuple[str, ...]
    hard: tuple[str, ...]
    progress: float

    @property
    def active(self) -> tuple[str, ...]:
        return self.hard + self.soft


def phase_at(strategy: str, kinds: Sequence[str], step: int, steps: int, every: int = 50) -> Phase:
    """
    The phase of a step.

    Args:
        strategy (`str`): one of `STRATEGIES`.
        kinds (`Sequence[str]`): kinds of gates that are trained.
        step (`int`): number of the step, from 0.
        steps (`int`): steps of the run.
        every (`int`, *optional*, defaults to 50): steps before `alternating` turns to the next gate.

    Raises:
        ValueError: for an unknown strategy, or a `sequential` run with fewer steps than gates.
    """
    order = tuple(kind for kind in ORDER if kind in kinds)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: use one of {list(STRATEGIES)}")
    step, whole = min(step, steps - 1), max(steps - 1, 1)
    if strategy == "sequential":
        if steps < len(order):
            raise ValueError(f"max_steps={steps} is too short to train {len(order)} gates one after the other")
        place = step * len(order) // steps
        first, after = (-(-number * steps // len(order)) for number in (place, place + 1))
        progress = (step - first) / max(after - 1 - first, 1)
        return Phase(order[place : place + 1], order[place : place + 1], order[:place], progress)
    if strategy == "alternating":
        trained = (order[step // every % len(order)],)
        return Phase(trained, order, (), step / whole)
    return Phase(order, order, (), step / whole)

"""The thresholds of MoDES for a wanted skip rate: one for all tokens, or one for text and one for images and video."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .calibration_passes import BlockMeasurement, CalibrationError, CalibrationInputs, measure_budget
from .calibration_search import staircase, threshold_for_rate
from .calibration_weights import WeightHistogram
from .saliency import GROUPS


TEXT_GROUPS = (GROUPS.index("text"), GROUPS.index("pooled"))  # `<emb>` is routed as text
MODALITIES = ("text", "image", "video")


@dataclass(frozen=True)
class ThresholdSettings:
    """What is looked for.

    Args:
        skip_rate (`float`): wanted fraction of the pairs to skip.
        tolerance (`float`): how far off the measured fraction may be.
        two (`bool`): a threshold for text and one for images and video, not one for all.
        grid (`int`): values of each of the two that are looked at.
        frontier_items (`int`): items on which their combinations are compared.
        base (`Mapping`): the budget's other settings.
        modes (`Mapping`): `min_experts`, `min_experts_emb` and `renormalise`.
    """

    skip_rate: float = 0.5
    tolerance: float = 0.005
    two: bool = False
    grid: int = 16
    frontier_items: int = 128
    base: Mapping[str, Any] = field(default_factory=dict)
    modes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def protected(self) -> list[int]:
        """Experts of a token that are never skipped, by group."""
        low = self.modes.get("min_experts", 0)
        return [max(low, self.modes.get("min_experts_emb", 1)) if name == "pooled" else low for name in GROUPS]

    def budget(self, scales: list[float] | dict[str, list[float]], tau: Sequence[float]) -> dict[str, Any]:
        """The budget of a threshold for text and one for the rest."""
        text, visual = map(float, tau)
        thresholds = {"text": text, "image": visual, "video": visual} if self.two else text
        return {**self.base, "modes": {**self.modes, "layer_scales": scales, "tau": thresholds}}


@dataclass(frozen=True)
class Calibrated:
    """The result.

    Args:
        budget (`dict`): the compute budget.
        rate, distance (`float`): measured on all items: skipped fraction, and mean of 1 - cosine.
        frontier (`list[dict]`): with two thresholds, the combinations that just skip enough: `tau_text`,
            `tau_visual`, `rate` and `distance` on the frontier's items, `chosen`.
        passes (`int`): budgets that were measured.
    """

    budget: dict[str, Any]
    rate: float
    distance: float
    frontier: list[dict[str, Any]]
    passes: int


def group_scales(scales: list[float] | dict[str, list[float]]) -> Tensor:
    """Layer scales as a table, `torch.DoubleTensor` of shape `(blocks, groups)`."""
    columns = [scales.get(name, scales["text"]) if isinstance(scales, dict) else scales for name in GROUPS]
    return torch.tensor(columns, dtype=torch.float64).T


def by_group(text: float, visual: float) -> list[float]:
    """One number for the groups routed as text, another for the others."""
    return [text if group in TEXT_GROUPS else visual for group in range(len(GROUPS))]


class ThresholdSearch:
    """
    Finds thresholds. The first guess comes from the weights of the full pass; a measured budget then tells the weights
    under that budget, from which the next guess comes, so that two or three passes do.

    Args:
        inputs ([`CalibrationInputs`]): model and items.
        measured ([`BlockMeasurement`]): the full pass.
        settings ([`ThresholdSettings`]): what is looked for.

    Raises:
        CalibrationError: the rate cannot be reached, or two thresholds are wanted for one kind of tokens.
    """

    def __init__(self, inputs: CalibrationInputs, measured: BlockMeasurement, settings: ThresholdSettings):
        self.inputs, self.measured, self.settings = inputs, measured, settings
        self.scales = measured.scales(settings.two)
        self.table = group_scales(self.scales)
        self.passes = 0
        most = self._rate(measured.histogram, [math.inf, math.inf])
        if settings.skip_rate > most:
            raise CalibrationError(
                f"skip_rate is {settings.skip_rate}, but at most {most:.4f} of the pairs can be skipped when "
                f"{settings.protected[0]} of a token's experts and {settings.protected[-1]} of <emb>'s are kept: "
                "lower skip_rate, min_experts or min_experts_emb"
            )
        pairs = measured.histogram.counts.sum(dim=(0, 2, 3))
        visual = int(pairs.sum()) - sum(int(pairs[group]) for group in TEXT_GROUPS)
        if settings.two and not visual:
            raise CalibrationError(
                "thresholds is 'two', but calibration_data has no images and no video: write 'one', or add items"
            )

    def run(self) -> Calibrated:
        """Finds the thresholds and measures them on all items."""
        direction, frontier = [1.0, 1.0], []
        if self.settings.two:
            direction, frontier = self._frontier()
        factor, rate, distance = self._scaled(direction)
        if abs(rate - self.settings.skip_rate) > self.settings.tolerance:
            raise CalibrationError(
                f"no threshold skips {self.settings.skip_rate:.4f} of the pairs within {self.settings.tolerance}: the "
                f"nearest of {self.passes} skips {rate:.4f}. Raise tolerance, or calibrate on more items"
            )
        budget = self.settings.budget(self.scales, [factor * tau for tau in direction])
        return Calibrated(budget, rate, distance, frontier, self.passes)

    def _rate(self, histogram: WeightHistogram, tau: Sequence[float]) -> float:
        return histogram.rate(self.table, by_group(*tau), self.settings.protected)

    def _measure(self, tau: Sequence[float], most: int | None = None) -> Any:
        self.passes += 1
        shown = " and ".join(f"{value:.3g}" for value in (tau if self.settings.two else tau[:1]))
        budget = self.settings.budget(self.scales, tau)
        return measure_budget(self.inputs, budget, self.measured.vectors, most, f"Threshold {shown}")

    def _scaled(self, direction: Sequence[float]) -> tuple[float, float, float]:
        """The factor at which `direction` meets the rate on all items; that rate, and the distance."""
        seen: dict[float, Any] = {}
        last: list[WeightHistogram] = [self.measured.histogram]

        def rate(factor: float) -> float:
            seen[factor] = self._measure([factor * tau for tau in direction])
            last[0] = seen[factor].histogram
            return seen[factor].rate

        def propose() -> float:
            try:
                return last[0].factor_for_rate(
                    self.table, by_group(*direction), self.settings.protected, self.settings.skip_rate
                )
            except ValueError:  # under that budget fewer pairs are free to be skipped
                return math.inf

        guess = propose()
        if math.isinf(guess):
            guess = 1.0
        factor, found = threshold_for_rate(
            rate, guess, self.settings.skip_rate, self.settings.tolerance, propose=propose
        )
        return factor, found, seen[factor].distance

    def _frontier(self) -> tuple[list[float], list[dict[str, Any]]]:
        """The best of the combinations that just skip enough by the weights of the full pass, and all of them.

        The grid holds thresholds that skip evenly spaced fractions of the text's or of the other tokens' pairs: MoDES'
        own grid of fixed numbers suits the scales of one model.
        """
        settings, histogram = self.settings, self.measured.histogram
        grids = [self._axis(histogram, place) for place in range(2)]
        cells: dict[tuple[int, int], dict[str, Any]] = {}

        def loss(row: int, column: int) -> float:
            tau = [grids[0][row], grids[1][column]]
            found = self._measure(tau, settings.frontier_items)
            cells[row, column] = {
                "tau_text": tau[0], "tau_visual": tau[1], "rate": found.rate, "distance": found.distance
            }  # fmt: skip
            return found.distance

        best = staircase(
            lambda row, column: self._rate(histogram, [grids[0][row], grids[1][column]]),
            loss,
            len(grids[0]),
            len(grids[1]),
            settings.skip_rate,
        )
        if best is None:  # the last values of the grid skip what can be skipped, but for rounding
            best = (len(grids[0]) - 1, len(grids[1]) - 1)
        frontier = [cell | {"chosen": place == best} for place, cell in cells.items()]
        return [grids[0][best[0]], grids[1][best[1]]], frontier

    def _axis(self, histogram: WeightHistogram, place: int) -> list[float]:
        direction = [0.0, 0.0]
        direction[place] = 1.0
        most = self._rate(histogram, [math.inf * tau if tau else 0.0 for tau in direction])
        last = self.settings.grid - 1
        values = [
            histogram.factor_for_rate(
                self.table, by_group(*direction), self.settings.protected, most * step / last * (1 - 1e-9)
            )
            for step in range(1, last + 1)
        ]
        return [0.0, *values]


__all__ = ["Calibrated", "ThresholdSearch", "ThresholdSettings"]

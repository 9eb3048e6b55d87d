"""Searches of MoDES thresholds that spare most forward passes."""

from collections.abc import Callable


# After so many proposals that did not meet the rate the bracket is halved instead: that always ends.
_PROPOSALS = 6


def threshold_for_rate(
    rate: Callable[[float], float],
    guess: float,
    target: float,
    tolerance: float = 0.005,
    most: int = 24,
    propose: Callable[[], float] | None = None,
) -> tuple[float, float]:
    """The threshold at which `rate`, which rises with it, is within `tolerance` of `target`.

    Args:
        rate (`Callable[[float], float]`): skip rate at a threshold; measured, so each call is a forward pass.
        guess (`float`): where to look first, above 0, such as the quantile of the scores of one full pass.
        target (`float`): the wanted rate, from 0 to 1.
        tolerance (`float`, defaults to 0.005): half a point.
        most (`int`, defaults to 24): calls of `rate` at most.
        propose (`Callable[[], float]`, *optional*): called after a measurement, says where the rate is likely to be
            met; taken when it lies inside the bracket, which is halved (or doubled) otherwise.

    Returns:
        The threshold and its rate: the nearest one seen when `tolerance` cannot be met, because the rate jumps there.

    Raises:
        ValueError: if `guess` is not above 0 or `target` is not between 0 and 1.
    """
    if not guess > 0 or not 0 <= target <= 1:
        raise ValueError(f"the guess must be above 0 and the target from 0 to 1, got {guess} and {target}")
    low, high, tau, best = 0.0, None, guess, None
    for call in range(most):
        value = rate(tau)
        if best is None or abs(value - target) < abs(best[1] - target):
            best = (tau, value)
        if abs(value - target) <= tolerance:
            break
        if value < target:
            low = tau
        else:
            high = tau
        tau = 2 * low if high is None else (low + high) / 2
        if propose is not None and call < _PROPOSALS:
            better = propose()
            if low < better < (float("inf") if high is None else high):
                tau = better
    return best


def staircase(
    rate: Callable[[int, int], float],
    loss: Callable[[int, int], float],
    rows: int,
    columns: int,
    target: float,
) -> tuple[int, int] | None:
    """The cell of a grid of two thresholds with the least loss among those that skip enough (MoDES, arXiv 2511.15690).

    Both functions rise along rows and columns. The cells that just skip enough form a staircase, and one of its steps
    is best: it is walked with at most `rows + columns` calls of `rate` and `rows` of `loss`, not `rows * columns`.

    Args:
        rate (`Callable[[int, int], float]`): skip rate with the row's and the column's threshold.
        loss (`Callable[[int, int], float]`): what the two cost.
        rows, columns (`int`): thresholds of each kind, in rising order.
        target (`float`): the least rate.

    Returns:
        Row and column, the first of equals, or `None` if no cell skips enough.
    """
    best, column = None, columns - 1
    for row in range(rows):
        enough = column < columns - 1 or rate(row, column) >= target  # what sufficed in the row before still does
        if not enough:
            continue
        while column > 0 and rate(row, column - 1) >= target:
            column -= 1
        value = loss(row, column)
        if best is None or value < best[0]:
            best = (value, row, column)
    return None if best is None else best[1:]


__all__ = ["staircase", "threshold_for_rate"]

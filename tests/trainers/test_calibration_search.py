"""Threshold searches against looking everywhere."""

import random

import pytest

from moemb.trainers.calibration_search import staircase, threshold_for_rate


def rising_grid(generator: random.Random, rows: int, columns: int, top: int) -> list[list[float]]:
    """Values that rise along rows and columns, with plateaus."""
    cells = [[0.0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            before = max(cells[i - 1][j] if i else 0, cells[i][j - 1] if j else 0)
            cells[i][j] = before + generator.randint(0, top)
    last = cells[-1][-1] or 1
    return [[value / last for value in row] for row in cells]


@pytest.mark.parametrize("seed", range(60))
def test_staircase_equals_brute_force(seed):
    generator = random.Random(seed)
    rows, columns = generator.randint(1, 9), generator.randint(1, 9)
    rates, losses = (rising_grid(generator, rows, columns, top) for top in (3, 5))
    target = generator.choice([0.0, 0.3, 0.571, 0.9, 1.0, 1.1])
    calls = []
    found = staircase(
        lambda i, j: calls.append((i, j)) or rates[i][j], lambda i, j: losses[i][j], rows, columns, target
    )
    feasible = [losses[i][j] for i in range(rows) for j in range(columns) if rates[i][j] >= target]
    if not feasible:
        assert found is None
    else:
        i, j = found
        assert rates[i][j] >= target and losses[i][j] == min(feasible)
    assert len(calls) <= rows + columns


@pytest.mark.parametrize("guess", [1e-4, 0.03, 5.0])
@pytest.mark.parametrize("target", [0.1, 0.571, 0.775, 0.99])
def test_a_threshold_meets_its_rate(guess, target):
    generator = random.Random(0)
    scores = [generator.random() ** 3 for _ in range(4000)]
    calls = []

    def rate(tau: float) -> float:
        calls.append(tau)
        return sum(score < tau for score in scores) / len(scores)

    tau, achieved = threshold_for_rate(rate, guess, target)
    assert achieved == rate(tau) and abs(achieved - target) <= 0.005
    assert len(calls) <= 25


@pytest.mark.parametrize("offset", [1.0, 1.3, 0.5, 1e-9, float("inf")])
def test_proposals_are_taken_and_bad_ones_do_no_harm(offset):
    """The best proposal ends the search at once; one that is always wrong leaves halving."""
    generator = random.Random(1)
    scores = sorted(generator.random() ** 3 for _ in range(4000))
    calls = []

    def rate(tau: float) -> float:
        calls.append(tau)
        return sum(score < tau for score in scores) / len(scores)

    wanted = scores[2400] * offset
    _, achieved = threshold_for_rate(rate, 1e-6, 0.6, propose=lambda: wanted)
    assert abs(achieved - 0.6) <= 0.005
    assert len(calls) == 2 if offset == 1.0 else len(calls) <= 24


def test_a_rate_that_jumps_gives_the_nearest_seen():
    tau, achieved = threshold_for_rate(lambda tau: 0.9 if tau > 1 else 0.1, 0.3, 0.8)
    assert achieved == 0.9 and tau > 1


def test_impossible_searches_are_refused():
    for guess, target in ((0, 0.5), (0.1, 1.5), (0.1, -0.1)):
        with pytest.raises(ValueError, match="guess must be above 0"):
            threshold_for_rate(lambda tau: 0.0, guess, target)

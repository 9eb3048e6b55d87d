"""Predicted skip rates against counting every weight."""

import math

import pytest
import torch

from modeling_moemb.routing_moemb import Routing, skip_below_threshold
from moemb.trainers.calibration_weights import BINS, WeightHistogram
from moemb.trainers.saliency import GROUPS


BLOCKS, SLOTS = 3, 4


def drawn(tokens: int = 2000, seed: int = 0) -> list[tuple[torch.Tensor, Routing]]:
    """Groups and routings of each block; some slots skipped, some weights tiny."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(BLOCKS):
        groups = torch.randint(0, len(GROUPS), (tokens,), generator=generator)
        weight = torch.softmax(3 * torch.randn(tokens, SLOTS, generator=generator), dim=-1)
        index = torch.randint(0, 8, (tokens, SLOTS), generator=generator)
        skipped = torch.rand(tokens, SLOTS, generator=generator) < 0.1
        found.append((groups, Routing(index, weight, 8).skip(skipped)))
    return found


def histogram_of(draw) -> WeightHistogram:
    histogram = WeightHistogram(BLOCKS, SLOTS)
    for block, (groups, routing) in enumerate(draw):
        for rows in (slice(0, 700), slice(700, None)):
            histogram.add(block, groups[rows], routing.weight[rows], routing.skipped[rows])
    return histogram


def counted(draw, scales, tau, protected) -> tuple[list[int], int]:
    """Pairs that the model's own rule skips, by group, and all pairs."""
    skipped, pairs = [0] * len(GROUPS), 0
    for block, (groups, routing) in enumerate(draw):
        tokens = (scales[block].float()[groups], torch.tensor(tau)[groups], torch.tensor(protected)[groups])
        after = skip_below_threshold(routing, *tokens)
        lost = (after.skipped & ~routing.skipped).sum(1)
        for group in range(len(GROUPS)):
            skipped[group] += int(lost[groups == group].sum())
        pairs += int((~routing.skipped).sum())
    return skipped, pairs


SCALES = torch.tensor([[0.5, 0.25, 1.0, 0.5], [0.25, 0.0, 0.5, 1.0], [1.0, 1.0, 0.125, 0.25]]).double()


@pytest.mark.parametrize("protected", [[0, 0, 0, 0], [0, 1, 2, 4]])
@pytest.mark.parametrize("tau", [[0.0625] * 4, [0.0, 0.5, 2.0**-8, 3.0], [2.0**-30] * 4, [1e9] * 4])
def test_counts_at_edges_of_bins_are_exact(tau, protected):
    draw = drawn()
    histogram = histogram_of(draw)
    skipped, pairs = counted(draw, SCALES, tau, protected)
    assert histogram.pairs == pairs
    found = histogram.skipped(SCALES, tau, protected)
    # weights below the smallest bin are counted as if they lay in it
    tiny = sum(int(((r.weight < 2.0**-24) & ~r.skipped).sum()) for _, r in draw)
    assert tiny < 10
    assert (found - torch.tensor(skipped)).abs().max() <= tiny
    assert histogram.rate(SCALES, tau, protected) == pytest.approx(sum(skipped) / pairs, abs=1e-3)


def test_counts_between_edges_are_near():
    draw = drawn()
    histogram = histogram_of(draw)
    for tau in (0.001, 0.0123, 0.04567, 0.1111, 0.3):
        skipped, pairs = counted(draw, SCALES, [tau] * 4, [0] * 4)
        assert histogram.rate(SCALES, [tau] * 4, [0] * 4) == pytest.approx(sum(skipped) / pairs, abs=5e-4)


@pytest.mark.parametrize("target", [0.12, 0.5, 0.6])
@pytest.mark.parametrize("direction", [[1.0] * 4, [1.0, 0.2, 0.2, 1.0], [0.0, 1.0, 1.0, 0.5]])
def test_a_factor_meets_its_rate_by_the_models_rule(target, direction):
    draw = drawn()
    factor = histogram_of(draw).factor_for_rate(SCALES, direction, [0, 0, 0, 1], target)
    skipped, pairs = counted(draw, SCALES, [factor * tau for tau in direction], [0, 0, 0, 1])
    assert sum(skipped) / pairs == pytest.approx(target, abs=1e-3)


def test_a_rate_beyond_what_is_free_is_refused():
    histogram = histogram_of(drawn())
    most = histogram.rate(SCALES, [math.inf] * 4, [2] * 4)
    assert 0.4 < most < 0.5
    histogram.factor_for_rate(SCALES, [1.0] * 4, [2] * 4, most - 1e-3)
    with pytest.raises(ValueError, match="at most 0.4"):
        histogram.factor_for_rate(SCALES, [1.0] * 4, [2] * 4, most + 1e-3)


def test_the_ends_of_the_axis():
    """The weight 1 and weights of 0 have bins; nothing is lost."""
    histogram = WeightHistogram(1, 2)
    weight, skipped = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[False, False], [False, True]])
    histogram.add(0, torch.tensor([0, 3]), weight, skipped)
    assert histogram.pairs == 3
    assert histogram.counts[0, 0, 0, BINS - 1] == histogram.counts[0, 3, 0, BINS - 1] == 1
    assert histogram.counts[0, 0, 1, 0] == 1 and histogram.counts[0, 3, 1].sum() == 0
    ones = torch.ones(1, 4).double()
    assert histogram.skipped(ones, [1.0] * 4, [0] * 4).tolist() == [1, 0, 0, 0]
    assert histogram.skipped(ones, [1.01] * 4, [0] * 4).tolist() == [2, 0, 0, 1]

import numpy as np
import pytest

from moemb.trainers.data import Sample
from moemb.trainers.mixture import Contrast, Group, Mixture, MixtureError


class Numbers:
    def __init__(self, name, size, chunk):
        self.name, self.size, self.chunk = name, size, chunk

    def draw(self, indices, rng):
        samples = [Sample((str(index),)) for index in indices]
        keys = [int(index) for index in indices]
        return Group(
            self.name, samples, keys, [Contrast([0], [0])], text_targets=[str(rng.integers(1000))] * len(keys)
        )


def trace(mixture, steps):
    return [[(g.source, g.keys, g.text_targets[0]) for g in mixture.groups(step)] for step in steps]


def test_a_step_depends_on_seed_and_step_alone():
    def build(seed=0):
        return Mixture([Numbers("a", 50, 8), Numbers("b", 20, 4)], [1, 0.5], seed)

    forward = trace(build(), range(20))
    assert trace(build(), [13, 4, 19]) == [forward[13], forward[4], forward[19]]
    assert trace(build(1), range(20)) != forward


def test_rates_are_kept_over_time():
    mixture = Mixture([Numbers("a", 50, 8), Numbers("b", 20, 4), Numbers("c", 20, 4)], [2, 0.25, 1.5])
    drawn = [name for step in trace(mixture, range(100)) for name, _, _ in step]
    assert [drawn.count(name) for name in "abc"] == [200, 25, 150]


def test_sources_with_the_same_fractional_rate_take_different_steps():
    mixture = Mixture([Numbers(name, 20, 4) for name in "abcd"], [1, 0.25, 0.25, 0.25])
    most = max(len(step) for step in trace(mixture, range(40)))
    assert most <= 3


def test_a_pass_visits_everything_once():
    mixture = Mixture([Numbers("a", 24, 8)], [1])
    for first in (0, 3, 6):
        keys = [key for step in trace(mixture, range(first, first + 3)) for key in step[0][1]]
        assert sorted(keys) == list(range(24))
    assert trace(mixture, [0])[0][0][1] != trace(mixture, [3])[0][0][1]


def test_a_chunk_may_be_larger_than_the_source():
    keys = Mixture([Numbers("a", 3, 8)], [1]).groups(0)[0].keys
    assert len(keys) == 8 and set(keys) == {0, 1, 2}


def test_a_step_is_never_empty():
    mixture = Mixture([Numbers("a", 10, 2)], [0.1])
    assert all(len(groups) == 1 for groups in trace(mixture, range(20)))


@pytest.mark.parametrize(
    ("sources", "rates", "message"),
    [
        ([Numbers("a", 5, 1)], [-1], "rate -1"),
        ([Numbers("a", 0, 1)], [1], "is empty"),
        ([Numbers("a", 5, 1)], [0], "nothing to train on"),
        ([Numbers("a", 5, 1), Numbers("a", 5, 1)], [1, 1], "repeat"),
    ],
)
def test_what_cannot_be_drawn_is_named(sources, rates, message):
    with pytest.raises(MixtureError, match=message):
        Mixture(sources, rates)


def test_an_empty_source_may_be_switched_off():
    assert Mixture([Numbers("a", 5, 1), Numbers("b", 0, 1)], [1, 0]).groups(0)[0].source == "a"


def test_group_lists_must_fit():
    with pytest.raises(MixtureError, match="1 keys for 2 samples"):
        Group("a", [Sample(("x",))] * 2, [1], [])
    assert Group("a", [Sample(("x",))], [np.int64(1)], []).image_targets == [None]

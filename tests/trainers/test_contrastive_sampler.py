from collections import Counter

import numpy as np
import pytest

from moemb.trainers.contrastive_sampler import MixtureBatchSampler
from moemb.trainers.contrastive_sources import DataError


SIZES = (40, 24, 64)


def sampler(weights=(None, None, None), **settings):
    return MixtureBatchSampler(SIZES, weights, 16, 8, **{"seed": 3, **settings})


def source(row):
    return int(np.searchsorted(np.cumsum(SIZES), row, side="right"))


def test_an_epoch_sees_every_row_once():
    batches = list(sampler())
    assert len(batches) == len(sampler()) == 8 and all(len(batch) == 16 for batch in batches)
    assert sorted(row for batch in batches for row in batch) == list(range(sum(SIZES)))


def test_sub_batches_are_of_one_data_set():
    for batch in sampler():
        assert all(len({source(row) for row in batch[part : part + 8]}) == 1 for part in (0, 8))
    assert len({tuple(source(row) for row in batch) for batch in sampler()}) > 1


def test_weights_are_shares_of_the_batches():
    drawn = Counter()
    mixture = sampler(weights=(1.0, 2.0, 1.0))
    for epoch in range(10):
        mixture.set_epoch(epoch)
        drawn.update(source(row) for batch in mixture for row in batch)
    total = sum(drawn.values())
    assert [drawn[number] / total for number in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.01)
    assert drawn[1] > 24 * 10  # the small one is walked through several times


def test_the_batch_does_not_depend_on_the_number_of_processes():
    parts = [list(sampler(rank=rank, world_size=4)) for rank in range(4)]
    assert [[row for part in batch for row in part] for batch in zip(*parts, strict=True)] == list(sampler())


def test_an_epoch_is_a_function_of_the_seed():
    mixture = sampler()
    first = list(mixture)
    mixture.set_epoch(1)
    second = list(mixture)
    assert first != second
    fresh = sampler()
    fresh.set_epoch(1)
    assert list(fresh) == second
    mixture.set_epoch(0)
    assert list(mixture) == first and list(sampler(seed=4)) != first


def test_too_few_rows_are_named():
    with pytest.raises(DataError, match="128 rows together.*batch_size=256"):
        MixtureBatchSampler(SIZES, (None,) * 3, 256, 64)

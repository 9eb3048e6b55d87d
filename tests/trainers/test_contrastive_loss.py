import math

import pytest
import torch
import torch.nn.functional as F

from moemb.trainers.contrastive_batches import ContrastiveBatch, EncodedItem
from moemb.trainers.contrastive_loss import ContrastiveLoss


def batch(query, positive, negatives=(), group=None, dataset=None, keys=None):
    count = max([*query, *positive, *negatives]) + 1
    keys = list(range(1, count + 1)) if keys is None else keys
    items = [EncodedItem(torch.zeros(1, dtype=torch.int32), (None, None), key, 0) for key in keys]
    return ContrastiveBatch(
        items,
        torch.tensor(query),
        torch.tensor(positive),
        torch.tensor(negatives, dtype=torch.long),
        torch.tensor(group or [0] * len(query)),
        torch.tensor(dataset or [0] * len(query)),
        list(range(len(query))),
    )


def vectors(count, size=6):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


def naive(rows, right, wrong, scale):
    """The mean over rows of -log(exp(s q.d) / (exp(s q.d) + sum over the wrong documents)), in plain numbers."""
    total = 0.0
    for query, document, others in zip(rows, right, wrong, strict=True):
        q = F.normalize(query.double(), dim=0)
        scores = [scale * float(q @ F.normalize(d.double(), dim=0)) for d in [document, *others]]
        total -= scores[0] - math.log(sum(map(math.exp, scores)))
    return total / len(rows)


def test_it_is_info_nce_over_all_documents():
    v = vectors(8)
    output = ContrastiveLoss(7.0)(v, batch([0, 1, 2], [3, 4, 5], [6, 7]))
    documents = list(v[3:])
    wrong = [[d for j, d in enumerate(documents) if j != i] for i in range(3)]
    assert output.value.item() == pytest.approx(naive(v[:3], v[3:6], wrong, 7.0), rel=1e-5)
    assert output.masked == 0


def test_documents_that_are_right_are_no_negatives():
    v = vectors(7)
    # rows 0 and 1 share a positive, rows 2 and 3 a query; row 2's negative is row 0's positive
    given = batch([0, 1, 2, 2], [3, 3, 4, 5], [3, 6])
    wrong = [[v[4], v[5], v[6]], [v[4], v[5], v[6]], [v[3], v[3], v[3], v[6]], [v[3], v[3], v[3], v[6]]]
    expected = naive(v[[0, 1, 2, 2]], v[[3, 3, 4, 5]], wrong, 5.0)
    assert ContrastiveLoss(5.0)(v, given).value.item() == pytest.approx(expected, rel=1e-5)
    all_wrong = ContrastiveLoss(5.0, mask_duplicates=False)(v, given).value.item()
    assert all_wrong > expected + 1e-3


def test_rows_of_one_key_are_not_contrasted():
    v = vectors(6)
    given = batch([0, 1, 2], [3, 4, 5], group=[9, 9, 0])
    wrong = [[v[5]], [v[5]], [v[3], v[4]]]
    assert ContrastiveLoss(5.0)(v, given).value.item() == pytest.approx(naive(v[:3], v[3:], wrong, 5.0), rel=1e-5)


def test_both_directions():
    v = vectors(7)
    forward = naive(v[:3], v[3:6], [[v[4], v[5], v[6]], [v[3], v[5], v[6]], [v[3], v[4], v[6]]], 5.0)
    backward = naive(v[3:6], v[:3], [[v[1], v[2]], [v[0], v[2]], [v[0], v[1]]], 5.0)
    loss = ContrastiveLoss(5.0, symmetric=True)(v, batch([0, 1, 2], [3, 4, 5], [6])).value.item()
    assert loss == pytest.approx((forward + backward) / 2, rel=1e-5)


def test_matryoshka_is_the_weighted_mean_over_lengths():
    v, given = vectors(6), batch([0, 1, 2], [3, 4, 5])
    parts = [ContrastiveLoss(5.0)(v[:, :size].contiguous(), given).value.item() for size in (2, 6)]
    loss = ContrastiveLoss(5.0, dims=[2, 6], weights=[3.0, 1.0])(v, given).value.item()
    assert loss == pytest.approx(0.75 * parts[0] + 0.25 * parts[1], rel=1e-5)


def test_hits_and_the_loss_of_each_data_set():
    v = torch.eye(4)[[0, 1, 2, 0, 1, 0]]  # the third query's positive equals the first's
    output = ContrastiveLoss(5.0)(v, batch([0, 1, 2], [3, 4, 5], dataset=[0, 0, 1]))
    assert output.hits.item() == pytest.approx(2 / 3)
    whole = (2 * output.by_dataset[0] + output.by_dataset[1]) / 3
    assert whole == pytest.approx(output.value.item(), rel=1e-5) and output.by_dataset[1] > output.by_dataset[0]

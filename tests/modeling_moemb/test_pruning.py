"""Which tokens are kept, against sorting in plain Python, and the scores of the controls against naive formulas."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from modeling_moemb.packing_moemb import IMAGE, TEXT, VIDEO, pack_batch
from modeling_moemb.pruning_moemb import (
    TokenPruning,
    attention_weights,
    fingerprints,
    hashed,
    rank_in_groups,
    received_attention,
)

from .batches import collate, mixed_items


@pytest.fixture(scope="module")
def packed():
    batch = collate(mixed_items())
    grids = {IMAGE: batch["image_grid_thw"], VIDEO: batch["video_grid_thw"]}
    return pack_batch(batch["mm_token_type_ids"], batch["attention_mask"], None, grids, 2)


def groups_of(packed, per_image: bool) -> list[list[int]]:
    """Rows that are ranked together, one token after the other."""
    groups, last = {}, None
    for row, (item, kind) in enumerate(zip(packed.segment.tolist(), packed.modality.tolist())):
        run = row if last is None or last[0] != (item, kind) else last[1]
        last = ((item, kind), run)
        if kind != TEXT:
            groups.setdefault((item, kind, run if per_image else None), []).append(row)
    return list(groups.values())


SETTINGS = [
    {"keep": 0.3},
    {"keep": 1e-9},
    {"keep": 0.5, "modalities": ["image"]},
    {"keep": 0.999},
    {"keep": {"video": 0.1}},
    {"keep": {"video": 0.25, "image": 1}},
    {"budget": 1},
    {"budget": 5},
    {"budget": {"image": 2}},
]


@pytest.mark.parametrize("scope", ["item", "image"])
@pytest.mark.parametrize("score", ["beta", "uniform"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_survivors_equal_sorting_by_hand(packed, settings, score, scope):
    pruning = TokenPruning.from_settings({"layer": 4, "scope": scope, "score": score, **settings})
    scores = torch.randint(0, 4, (packed.num_tokens,)).float()  # full of ties
    keep = pruning.keep(packed, scores)
    assert keep.dtype == torch.bool and bool(keep[packed.modality == TEXT].all())
    (key, amount), *_ = settings.items()
    named = settings.get("modalities", ["image", "video"])
    amounts = amount if isinstance(amount, dict) else dict.fromkeys(named, amount)
    for rows in groups_of(packed, scope == "image"):
        name = {IMAGE: "image", VIDEO: "video"}[int(packed.modality[rows[0]])]
        wanted = amounts.get(name)
        if wanted is None:
            count = len(rows)
        elif key == "keep":
            count = math.ceil(Fraction(str(wanted)) * len(rows))
        else:
            count = min(wanted, len(rows))
        if score == "beta":
            expected = set(sorted(rows, key=lambda row: (-scores[row].item(), row))[:count])
        else:
            expected = {
                row for place, row in enumerate(rows) if (place + 1) * count // len(rows) > place * count // len(rows)
            }
        assert {row for row in rows if keep[row]} == expected and len(expected) == count >= 1


def test_uniform_survivors_are_evenly_spread(packed):
    keep = TokenPruning(4, {IMAGE: 5, VIDEO: 5}, score="uniform").keep(packed, None)
    for rows in groups_of(packed, False):
        places = [place for place, row in enumerate(rows) if keep[row]]
        gaps = [after - before for before, after in itertools.pairwise(places)]
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("keep", "size", "kept"), [(0.3, 10, 3), (0.07, 100, 7), (0.1, 30, 3), (1 / 3, 9, 3), (0.29, 100, 29)]
)
def test_a_fraction_means_what_is_written(keep, size, kept):
    """In floating point 0.07 * 100 is above 7."""
    pruning = TokenPruning.from_settings({"layer": 1, "keep": keep})
    assert pruning.kept([size], IMAGE) == kept


@pytest.mark.parametrize("scope", ["item", "image"])
def test_the_number_kept_is_known_from_the_shape(packed, scope):
    pruning = TokenPruning.from_settings({"layer": 4, "keep": {"image": 0.4, "video": 0.3}, "scope": scope})
    keep = pruning.keep(packed, torch.randn(packed.num_tokens))
    for item in range(packed.num_items):
        for kind in (IMAGE, VIDEO):
            rows = [
                group
                for group in groups_of(packed, True)
                if (packed.segment[group[0]], packed.modality[group[0]]) == (item, kind)
            ]
            mine = (packed.segment == item) & (packed.modality == kind)
            assert int((keep & mine).sum()) == pruning.kept([len(group) for group in rows], kind)


def test_an_item_that_holds_nan_does_not_reach_its_neighbours(packed):
    pruning, scores = TokenPruning(4, {IMAGE: 2, VIDEO: 2}), torch.randn(packed.num_tokens)
    expected = pruning.keep(packed, scores)
    broken = packed.segment == 3
    keep = pruning.keep(packed, scores.masked_fill(broken, float("nan")))
    assert torch.equal(keep[~broken], expected[~broken]) and keep[broken].sum() == expected[broken].sum()


@pytest.mark.parametrize("settings", [None, {"layer": 4, "keep": 1}, {"layer": 4, "keep": {"image": 1.0}}])
def test_no_policy_when_nothing_can_be_dropped(settings):
    assert TokenPruning.from_settings(settings) is None


def test_ranks_equal_counting():
    score, group = torch.randint(0, 5, (200,)).float(), torch.randint(0, 7, (200,))
    rank, size = rank_in_groups(score, group)
    for row in range(200):
        before = (group == group[row]) & ((score > score[row]) | ((score == score[row]) & (torch.arange(200) < row)))
        assert rank[row] == before.sum() and size[row] == (group == group[row]).sum()


def naive_attention(attention, hidden, cos, sin):
    """Attention weights of one item in fp64, one head and query at a time, `(heads, queries, keys)`."""
    dim = attention.head_dim

    def turned(states, norm, position):  # (dim,)
        states = states / (states.square().mean() + norm.eps).sqrt() * (1 + norm.weight.double())
        turn, rest = states[: len(cos[0])], states[len(cos[0]) :]
        half = len(turn) // 2
        swapped = torch.cat([-turn[half:], turn[:half]])
        return torch.cat([turn * cos[position].double() + swapped * sin[position].double(), rest])

    hidden = hidden.double()
    query = (hidden @ attention.q_proj.weight.double().T).view(len(hidden), -1, 2, dim)[:, :, 0]
    key = (hidden @ attention.k_proj.weight.double().T).view(len(hidden), -1, dim)
    heads, repeat = query.shape[1], query.shape[1] // key.shape[1]
    weights = torch.zeros(heads, len(hidden), len(hidden), dtype=torch.float64)
    for head in range(heads):
        keys = torch.stack([turned(row[head // repeat], attention.k_norm, place) for place, row in enumerate(key)])
        for place in range(len(hidden)):
            scores = keys[: place + 1] @ turned(query[place, head], attention.q_norm, place) * dim**-0.5
            weights[head, place, : place + 1] = scores.softmax(0)
    return weights


def test_received_attention_equals_the_naive_formula(shared_model, monkeypatch):
    monkeypatch.setattr("modeling_moemb.pruning_moemb.QUERY_ROWS", 4)
    attention, lengths = shared_model.language_model.layers[3].self_attn, [1, 9, 3]
    hidden, angle = torch.randn(sum(lengths), 64), torch.rand(sum(lengths), 8).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    with torch.no_grad():
        received = received_attention(attention, hidden, (cos, sin), lengths)
        rows = {
            queries.start: weights for queries, _, weights in attention_weights(attention, hidden, (cos, sin), lengths)
        }
    start = 0
    for length in lengths:
        item = slice(start, start + length)
        expected = naive_attention(attention, hidden[item], cos[item], sin[item])
        torch.testing.assert_close(received[item].double(), expected.mean(0).sum(0) / length, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(rows[start].double(), expected[:, :4, :4], atol=1e-6, rtol=1e-5)
        start += length
    assert received.dtype == torch.float32


def split_mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_random_numbers_are_those_of_split_mix():
    assert split_mix(0) == 0xE220A8397B1DCDAF  # its first published output
    values = torch.tensor([0, 1, -5, 2**62, -(2**63)])
    assert [value % 2**64 for value in hashed(values).tolist()] == [split_mix(v % 2**64) for v in values.tolist()]
    both = [split_mix((split_mix(v % 2**64) + 7) % 2**64) for v in values.tolist()]
    assert [value % 2**64 for value in hashed(values, 7).tolist()] == both


def test_random_survivors_are_even_and_change_with_the_seed(packed):
    rows = groups_of(packed, False)[0]
    pruning, counts = TokenPruning(4, {IMAGE: len(rows) // 4, VIDEO: 1}, score="random"), torch.zeros(len(rows))
    for seed in range(400):
        counts += pruning.keep(packed, hashed(torch.arange(packed.num_tokens), seed))[rows]
    assert counts.sum() == 400 * (len(rows) // 4)
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation below 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64])
def test_fingerprints_tell_rows_apart_by_value_and_place(dtype):
    rows = (torch.rand(50, 12) * 200).to(dtype)
    rows[1] = rows[0]
    rows[2] = rows[0].flip(0)
    prints = fingerprints(rows)
    assert prints[0] == prints[1] and len(set(prints.tolist())) == 49
    assert torch.equal(fingerprints(rows[5:9]), prints[5:9])

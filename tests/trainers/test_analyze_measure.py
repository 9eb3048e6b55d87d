"""What the figures are drawn from, against plain loops over single items."""

import math

import numpy as np
import pytest
import torch

from modeling_moemb import pruning_moemb
from moemb.trainers.analyze_measure import (
    BETA_BINS,
    PAIRS,
    SOURCES,
    TYPES,
    average_ranks,
    half_overlap,
    mean_and_interval,
    measure_firing,
    measure_full,
    rank_correlation,
    score_tokens,
)
from moemb.trainers.analyze_tables import (
    agreement_rows,
    beta_rows,
    firing_rows,
    focus_rows,
    load_rows,
    saliency_rows,
    write_csv,
)
from moemb.trainers.calibration_passes import CalibrationInputs
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, EXPERTS, TOP_K, calibration_items, pruning_model


IDENTITY = {"model": "m" * 64, "data": "d" * 64}
LINEAR, ATTENTION = [0, 1, 2, 4, 5, 6], [3, 7]


@pytest.fixture(scope="module")
def inputs(tiny_settings, tmp_path_factory):
    processor = lean_processor()
    model = pruning_model(tiny_settings, processor)
    folder = tmp_path_factory.mktemp("sums")
    return CalibrationInputs(model, processor, calibration_items(9), IDENTITY, folder, batch_size=4, progress=False)


@pytest.fixture(scope="module")
def full(inputs):
    return measure_full(inputs)


def single(inputs, item):
    return score_tokens(inputs, [item])


@pytest.mark.parametrize("seed", range(5))
def test_ranks_and_correlations_with_ties(seed):
    generator = np.random.default_rng(seed)
    first, second = (generator.integers(0, 6, 12) for _ in range(2))

    def ranks(values):
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    assert average_ranks(torch.tensor(first)).tolist() == ranks(first)
    wanted = np.corrcoef(ranks(first), ranks(second))[0, 1]
    assert rank_correlation(torch.tensor(first), torch.tensor(second)) == pytest.approx(wanted)


def test_correlations_at_the_ends():
    values = torch.tensor([0.1, 0.5, 0.2, 0.9, 0.7, 0.3])
    assert rank_correlation(values, values.exp()) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert half_overlap(values, values) == 1 and half_overlap(values, -values) == 0
    assert half_overlap(values, torch.tensor([0.9, 0.8, 0.1, 0.7, 0.0, 0.2])) == pytest.approx(2 / 3)
    assert math.isnan(rank_correlation(values, torch.ones(6)))
    assert math.isnan(rank_correlation(values[:5], values[:5])) and math.isnan(half_overlap(values[:5], values[:5]))


def test_intervals():
    mean, low, high, count = mean_and_interval(torch.tensor([1.0, float("nan"), 3.0, 2.0]).double())
    assert (mean, count) == (2, 3) and 1 <= low < 2 < high <= 3
    assert mean_and_interval(torch.full((2,), float("nan")))[3] == 0


def test_beta_is_the_mean_write_strength_over_heads(inputs):
    item = inputs.items[-2]
    layers, seen = inputs.model.language_model.layers, {}
    handles = [
        layers[block].input_layernorm.register_forward_hook(lambda _, __, out, block=block: seen.update({block: out}))
        for block in LINEAR
    ]
    found = single(inputs, item)
    for handle in handles:
        handle.remove()
    assert list(found.beta) == LINEAR
    for block in LINEAR:
        weight = layers[block].linear_attn.in_proj_b.weight.detach().double()
        wanted = (1 / (1 + (-(seen[block].double() @ weight.T)).exp())).mean(-1)
        torch.testing.assert_close(found.beta[block].double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.beta_before(3), (found.beta[0] + found.beta[1] + found.beta[2]) / 3)


def test_attention_rows_are_those_of_each_item(inputs, monkeypatch):
    batch = [item for item in inputs.items if item.side == "document"][:3]
    together = score_tokens(inputs, batch)
    monkeypatch.setattr(pruning_moemb, "QUERY_ROWS", 5)
    pieces = score_tokens(inputs, batch)
    start = 0
    for item, length in zip(batch, together.lengths, strict=True):
        rows, alone = slice(start, start + length), single(inputs, item)
        assert alone.lengths == [length] and torch.equal(alone.types, together.types[rows])
        for block in ATTENTION:
            for name in ("received", "emb_row"):
                values = getattr(together, name)[block][rows]
                assert float(values.sum()) == pytest.approx(1, abs=1e-4)
                for other in (getattr(alone, name)[block], getattr(pieces, name)[block][rows]):
                    torch.testing.assert_close(values, other, rtol=1e-4, atol=1e-6)
            last = together.received[block][rows][-1] * length  # only the last token attends to the last
            assert float(last) == pytest.approx(float(together.emb_row[block][rows][-1]), rel=1e-4)
        start += length


def test_kinds_of_tokens(inputs):
    item = inputs.items[-2]
    found = single(inputs, item)
    config, ids = inputs.model.config, found.features["input_ids"][0].tolist()
    kinds = {
        config.image_token_id: "image",
        config.video_token_id: "video",
        config.vision_start_token_id: "delimiter",
        config.vision_end_token_id: "delimiter",
        config.emb_token_id: "emb",
    }
    assert [TYPES[kind] for kind in found.types.tolist()] == [kinds.get(token, "text") for token in ids]
    seen = {TYPES[kind] for item in inputs.items for kind in single(inputs, item).types.tolist()}
    assert seen == set(TYPES)


def test_sums_equal_loops_over_single_items(inputs, full):
    load = torch.zeros(BLOCKS, 3, EXPERTS, dtype=torch.long)
    beta = torch.zeros(len(LINEAR), len(TYPES), BETA_BINS, dtype=torch.long)
    focus = torch.zeros(len(ATTENTION), len(SOURCES), len(TYPES), dtype=torch.float64)
    for number, item in enumerate(inputs.items):
        found = single(inputs, item)
        load += found.output.compute.expert_load
        for place, block in enumerate(LINEAR):
            for kind, value in zip(found.types, found.beta[block], strict=True):
                beta[place, kind, int(value * BETA_BINS)] += 1
        visual = [place for place, kind in enumerate(found.types.tolist()) if TYPES[kind] in ("image", "video")]
        for place, block in enumerate(ATTENTION):
            values = {
                "tokens": torch.ones(len(found.types)), "beta": found.beta_before(block),
                "received": found.received[block], "emb row": found.emb_row[block],
            }  # fmt: skip
            for source, name in enumerate(SOURCES):
                for kind in range(len(TYPES)):
                    focus[place, source, kind] += values[name][found.types == kind].sum() / values[name].sum()
            for pair, names in enumerate(PAIRS):
                one, other = (values[name][visual] for name in names)
                for table, measure in ((full.correlation, rank_correlation), (full.overlap, half_overlap)):
                    wanted = measure(one, other)
                    assert float(table[number, place, pair]) == pytest.approx(wanted, abs=1e-3, nan_ok=True)
        for place, block in enumerate(LINEAR):
            following = 3 if block < 3 else 7
            wanted = rank_correlation(found.beta[block][visual], found.received[following][visual])
            assert float(full.by_block[number, place, 1]) == pytest.approx(wanted, abs=1e-3, nan_ok=True)
    assert torch.equal(full.load, load) and full.items == len(inputs.items)
    assert (full.beta - beta).abs().sum() <= 4, "but for a value on the edge of a bin"
    assert torch.equal(full.beta.sum(-1), beta.sum(-1))
    torch.testing.assert_close(full.focus, focus, rtol=1e-4, atol=1e-5)
    with_pictures = ~full.correlation[:, 0, 0].isnan()
    assert 0 < int(with_pictures.sum()) < len(inputs.items)


def test_a_second_pass_reads_the_first(inputs, full, monkeypatch):
    monkeypatch.setattr(CalibrationInputs, "features", lambda *_: pytest.fail("it was measured again"))
    again = measure_full(inputs)
    for name, value in vars(full).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(again, name).nan_to_num(9), value.nan_to_num(9)), name


def test_firing_rates_are_what_was_executed(inputs):
    budgets = {
        "half": {"token_pruning": {"layer": 4, "keep": 0.5}},
        "one expert": {"top_k": 1},
        "both": {"token_pruning": {"layer": 2, "keep": {"video": 0.25}}, "per_modality": {"image": 1}},
    }
    fired = {name: measure_firing(inputs, budget, name) for name, budget in budgets.items()}
    rows = firing_rows(fired, TOP_K, len(inputs.items))
    assert len(rows) == len(budgets) * BLOCKS * 3
    found = {(row["budget"], row["block"], row["modality"]): row for row in rows}
    for (name, block, modality), row in found.items():
        last = block == BLOCKS - 1 and modality != "text"
        if name == "one expert":
            assert row["dropped"] == 0 and (math.isnan(row["skipped"]) if last else row["skipped"] == 0.5)
        if name == "half":
            assert (row["dropped"] == 0) == (block < 4 or modality == "text")
            assert row["dropped"] == 0 or 0.4 < row["dropped"] <= 0.5
            assert math.isnan(row["skipped"]) if last else row["skipped"] == 0
        if name == "both" and not last:
            assert row["skipped"] == (0.5 if modality == "image" else 0)
            assert (row["dropped"] > 0) == (modality == "video" and block >= 2)
    tokens = {row["modality"]: row["tokens"] for row in rows}
    grids = [single(inputs, item).types for item in inputs.items]
    assert tokens["image"] == sum(int((types == TYPES.index("image")).sum()) for types in grids)


def test_tables_of_the_full_pass(inputs, full, tmp_path):
    beta = beta_rows(full, LINEAR)
    assert [row["block"] for row in beta[:: len(TYPES)]] == LINEAR
    scored = [single(inputs, item) for item in inputs.items]
    types = torch.cat([found.types for found in scored])
    for row in beta:
        values = torch.cat([found.beta[row["block"]] for found in scored])
        chosen = values[types == TYPES.index(row["type"])].double()
        assert row["tokens"] == len(chosen) and row["mean"] == pytest.approx(float(chosen.mean()), abs=2e-3)
        assert row["p50"] == pytest.approx(float(chosen.median()), abs=0.02)
    load = load_rows(full)
    assert sum(row["pairs"] for row in load) == int(full.load.sum())
    assert sum(row["share"] for row in load if (row["block"], row["modality"]) == (2, "image")) == pytest.approx(1)
    focus = focus_rows(full, ATTENTION)
    assert sum(row["share"] for row in focus) == pytest.approx(len(ATTENTION) * len(SOURCES))
    agreement = agreement_rows(full, LINEAR, ATTENTION)
    joint = [row for row in agreement if row["beta_block"] == "all before"]
    assert len(joint) == 4 and all(row["low"] <= row["correlation"] <= row["high"] for row in joint)
    assert {row["beta_block"] for row in agreement} == {"", "all before", *LINEAR}
    text = write_csv(tmp_path / "a.csv", [{"a": 1, "b": float("nan")}, {"a": "x,y", "b": 1 / 3}]).read_text()
    assert text == 'a,b\n1,\n"x,y",0.333333\n'


def test_rows_of_a_sweep():
    def point(saliency, experts, value, change):
        interval = [change - 0.01, change + 0.01]
        return {"saliency": saliency, "experts": experts, "mean": {"R@10": value},
                "change": {"R@10": {"value": change, "interval": interval}}}  # fmt: skip

    points = [
        point("", 16, 0.5, 0.0),
        point("reap", 8, 0.4, -0.1),
        point("man", 8, 0.3, -0.2),
        point("man", 4, 0.1, -0.4),
    ]
    rows = saliency_rows({"points": points})
    assert [(row["saliency"], row["experts"]) for row in rows] == [
        ("reap", 16), ("reap", 8), ("man", 16), ("man", 8), ("man", 4)
    ]  # fmt: skip
    assert rows[1]["R@10"] == 40 and rows[1]["change"] == -10 and rows[1]["low"] == pytest.approx(-11)

"""What calibration measures against whole forward passes of one item at a time, and what stopped runs leave."""

import os
import signal

import numpy as np
import pytest
import torch

from moemb.trainers import calibration_passes
from moemb.trainers.calibration_data import CalibrationItem
from moemb.trainers.calibration_passes import (
    BYPASSED,
    BlockMeasurement,
    CalibrationError,
    CalibrationInputs,
    measure_blocks,
    measure_budget,
    vector_distance,
)
from moemb.trainers.calibration_weights import WeightHistogram
from moemb.trainers.saliency import GROUPS
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, TOP_K, calibration_items, pruning_model


IDENTITY = {"model": "m" * 64, "data": "d" * 64}
SCALES = [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
MODES = {"modes": {"layer_scales": SCALES, "tau": 0.05}}


@pytest.fixture(scope="module")
def processor():
    return lean_processor()


@pytest.fixture(scope="module")
def model(tiny_settings, processor):
    return pruning_model(tiny_settings, processor)


@pytest.fixture
def inputs_of(model, processor, tmp_path):
    def make(items, name="sums", batch_size=4, **changes):
        settings = {"identity": IDENTITY, "folder": tmp_path / name, "batch_size": batch_size, "progress": False}
        return CalibrationInputs(model, processor, items, **(settings | changes))

    return make


def vector(model, processor, item, budget=None) -> torch.Tensor:
    features = processor([item.value], instruction=processor.embedding["prompts"].get(item.side) or "")
    with torch.no_grad():
        return model(**features, adaptive_compute=budget or {}).pooler_output[0].double()


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return 1 - float(torch.dot(first, second) / first.norm() / second.norm())


def bypassed_vector(model, processor, item, block: int, kind: str) -> torch.Tensor:
    """The oracle: a whole forward pass in which the experts' output is multiplied by zero, token by token."""
    features = processor([item.value], instruction=processor.embedding["prompts"].get(item.side) or "")
    modality = features["mm_token_type_ids"][0]
    alive = torch.zeros(len(modality)) if kind == "all" else (modality != BYPASSED.index(kind) - 1).float()
    experts = model.language_model.layers[block].mlp.experts
    handle = experts.register_forward_hook(lambda _, __, output: output * alive[:, None])
    with torch.no_grad():
        found = model(**features, adaptive_compute={}).pooler_output[0].double()
    handle.remove()
    return found


def test_distances_equal_whole_passes_of_one_item_at_a_time(model, processor, inputs_of):
    items = calibration_items(5)
    found = measure_blocks(inputs_of(items), by_modality=True)
    wanted = torch.zeros(len(BYPASSED), BLOCKS, dtype=torch.float64)
    present = [0] * len(BYPASSED)
    for item in items:
        full = vector(model, processor, item)
        kinds = [kind for kind in BYPASSED if kind in ("all", "text") or _has(item, kind)]
        for kind in kinds:
            present[BYPASSED.index(kind)] += 1
            for block in range(BLOCKS):
                moved = bypassed_vector(model, processor, item, block, kind)
                wanted[BYPASSED.index(kind), block] += distance(full, moved)
    assert found.present.tolist() == present and min(present) > 0
    torch.testing.assert_close(found.distance, wanted, rtol=1e-3, atol=1e-6)
    assert (found.distance[:2] > 1e-5).all(), "a block that does nothing shows nothing"
    vectors = torch.stack([vector(model, processor, item) for item in items])
    torch.testing.assert_close(found.vectors.double(), vectors, rtol=1e-4, atol=1e-4)


def _has(item: CalibrationItem, kind: str) -> bool:
    return isinstance(item.value, dict) and kind in item.value


def test_the_last_block_moves_nothing_but_by_the_pooled_token(inputs_of):
    found = measure_blocks(inputs_of(calibration_items(6)), by_modality=True)
    last = found.distance[:, -1]
    assert last[BYPASSED.index("text")] == last[BYPASSED.index("all")] > 0
    assert last[BYPASSED.index("image")] == last[BYPASSED.index("video")] == 0


def test_weights_are_those_of_full_compute_as_encoding_runs_it(model, processor, inputs_of):
    items = calibration_items(6)
    histogram = measure_blocks(inputs_of(items), by_modality=False).histogram
    lengths = [int(processor([item.value])["attention_mask"].sum()) for item in items]  # no prompts here
    by_block = histogram.counts.sum(dim=(1, 2, 3)).tolist()
    assert by_block == [TOP_K * sum(lengths)] * (BLOCKS - 1) + [TOP_K * len(items)]
    pooled = histogram.counts[:, GROUPS.index("pooled")].sum(dim=(1, 2))
    assert pooled.tolist() == [TOP_K * len(items)] * BLOCKS
    assert torch.equal(histogram.counts[..., 0, :].sum(-1), histogram.counts[..., 1, :].sum(-1)), "ranks pair up"


def known_measurement(rows: list[list[float]]) -> BlockMeasurement:
    distance = torch.tensor(rows, dtype=torch.float64)
    present = torch.tensor([int(any(row)) for row in rows])
    return BlockMeasurement(WeightHistogram(2, 2), distance, present, torch.zeros(1, 4))


def test_scales_are_shares_and_an_absent_modality_has_the_common_ones():
    found = known_measurement([[1.0, 3.0], [2.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert found.scales(False) == [0.25, 0.75]
    assert found.scales(True) == {"text": [1.0, 0.0], "image": [0.5, 0.5], "video": [0.25, 0.75]}
    with pytest.raises(CalibrationError, match="moves no vector in any block"):
        known_measurement([[0.0, 0.0]]).scales(False)


def test_small_distances_keep_their_digits():
    first = torch.zeros(1, 4)
    first[0, 0] = 1
    second = first.clone()
    second[0, 1] = 1e-7
    assert float(vector_distance(first, second)) == pytest.approx(5e-15, rel=1e-4)
    assert float(vector_distance(first, -3 * first)) == 2


@pytest.mark.parametrize(
    ("base", "tau"),
    [
        ({}, 0.05),
        ({"top_k": 1}, 0.15),
        ({"token_pruning": {"layer": 4, "keep": 0.5}}, 0.05),
        ({"token_pruning": {"layer": 4, "keep": 0.3}, "random_k": 1, "tiered_top_k": {"layer": 4, "min": 1}}, 0.15),
    ],
    ids=["alone", "top_k", "pruning", "everything"],
)
def test_a_budget_is_measured_as_it_runs(model, processor, inputs_of, base, tau):
    items, budget = calibration_items(9), base | {"modes": MODES["modes"] | {"tau": tau}}
    inputs = inputs_of(items)
    full = measure_blocks(inputs, by_modality=False).vectors
    found = measure_budget(inputs, budget, full)
    pairs = {"base": 0, "budget": 0}
    distances = []
    for item in items:
        features = processor([item.value])
        for name, given in (("base", base), ("budget", budget)):
            with torch.no_grad():
                output = model(**features, adaptive_compute=given, pooled_only=True, output_compute=True)
            pairs[name] += int(output.compute.expert_pairs.sum())
        distances.append(distance(vector(model, processor, item), vector(model, processor, item, budget)))
    assert found.histogram.pairs == pairs["base"]
    assert found.rate == 1 - pairs["budget"] / pairs["base"] and 0.02 < found.rate < 0.98
    assert found.distance == pytest.approx(np.mean(distances), rel=1e-3) and found.distance > 1e-6
    if not base:  # what it predicts of the budget it was measured under is that budget's rate, to half a bin
        scales = torch.tensor(SCALES).double()[:, None].expand(BLOCKS, len(GROUPS))
        assert found.histogram.rate(scales, [0.05] * 4, [0, 0, 0, 1]) == pytest.approx(found.rate, abs=0.002)


def test_a_threshold_of_zero_skips_nothing(inputs_of):
    inputs = inputs_of(calibration_items(4))
    full = measure_blocks(inputs, by_modality=False).vectors
    for tau in (0.0, {"text": 0.0, "image": 0.0}):
        found = measure_budget(inputs, {"modes": {"layer_scales": SCALES, "tau": tau}}, full)
        assert found.rate == 0 and found.distance < 1e-12 and found.histogram.pairs > 0


def test_some_items_are_spread_over_all(model, inputs_of):
    items = calibration_items(9)
    inputs = inputs_of(items)
    full = measure_blocks(inputs, by_modality=False).vectors
    few = measure_budget(inputs, MODES, full, most=3)
    chosen = [items[place] for place in (0, 3, 6)]
    own = inputs_of(chosen, "own")
    alone = measure_budget(own, MODES, measure_blocks(own, by_modality=False).vectors)
    assert (few.rate, few.histogram.pairs) == (alone.rate, alone.histogram.pairs)
    assert few.distance == pytest.approx(alone.distance, rel=1e-6)
    assert measure_budget(inputs, MODES, full).histogram.pairs > few.histogram.pairs, "the parts share a file"


def run_both(inputs) -> tuple:
    blocks = measure_blocks(inputs, by_modality=True)
    budget = measure_budget(inputs, MODES, blocks.vectors)
    return blocks, budget


def test_a_killed_calibration_goes_on(model, inputs_of, monkeypatch):
    items = calibration_items(8)
    whole = run_both(inputs_of(items, "whole", batch_size=2))
    inputs = inputs_of(items, "killed", batch_size=2)
    monkeypatch.setattr(calibration_passes, "SAVE_SECONDS", -1.0)
    for deadly in (3, 4):  # in the first pass, then, two batches later, in the second
        child = os.fork()
        if child == 0:
            try:
                calls = []

                def die(*_, calls=calls, deadly=deadly):
                    calls.append(1)
                    if len(calls) == deadly:
                        os.kill(os.getpid(), signal.SIGKILL)

                model.register_forward_pre_hook(die)
                run_both(inputs)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    forwards = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    blocks, budget = run_both(inputs)
    assert len(forwards) == 3, "what was measured before the kill was measured again"
    run_both(inputs)
    handle.remove()
    assert len(forwards) == 3
    for name in ("distance", "present", "vectors"):
        assert torch.equal(getattr(blocks, name), getattr(whole[0], name)), name
    assert torch.equal(blocks.histogram.counts, whole[0].histogram.counts)
    assert (budget.rate, budget.distance) == (whole[1].rate, whole[1].distance)
    assert torch.equal(budget.histogram.counts, whole[1].histogram.counts)


def test_sums_of_something_else_are_refused(inputs_of):
    items = calibration_items(2)
    inputs = inputs_of(items)
    measure_blocks(inputs, by_modality=False)
    for key in IDENTITY:
        other = inputs_of(items, identity=IDENTITY | {key: "0" * 64})
        with pytest.raises(CalibrationError, match="another model, other data or other settings: remove it"):
            measure_blocks(other, by_modality=False)
    (inputs.folder / "blocks.safetensors").write_bytes(b"nothing")
    with pytest.raises(CalibrationError, match=r"blocks.safetensors cannot be read .*remove it"):
        measure_blocks(inputs, by_modality=False)


def test_no_items_are_named_and_no_hook_is_left(model, inputs_of):
    with pytest.raises(CalibrationError, match="calibration_data"):
        measure_blocks(inputs_of([]), by_modality=False)
    with pytest.raises(Exception, match="item 0"):
        measure_blocks(inputs_of([CalibrationItem(object(), "query", "x")]), by_modality=False)
    assert all(not layer._forward_pre_hooks for layer in model.language_model.layers)


def test_a_prefix_that_items_share_counts_for_each(inputs_of):
    items = [CalibrationItem(f"{'a long common beginning ' * 8} and end {n}", "document", str(n)) for n in range(4)]
    together = measure_blocks(inputs_of(items, "together"), by_modality=False)
    alone = measure_blocks(inputs_of(items, "alone", batch_size=1), by_modality=False)
    assert together.histogram.pairs == alone.histogram.pairs
    torch.testing.assert_close(together.distance, alone.distance, rtol=1e-3, atol=1e-6)
    budgets = [measure_budget(inputs_of(items, name), MODES, together.vectors) for name in ("together", "alone")]
    assert budgets[0].rate == budgets[1].rate > 0

"""The experts' statistics against a plain loop over tokens and experts, and what a stopped measurement leaves."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModel

from moemb.trainers import saliency
from moemb.trainers.calibration_data import CalibrationItem
from moemb.trainers.convert_safetensors import read_checkpoint
from moemb.trainers.saliency import (
    GROUPS,
    POOLED,
    SALIENCIES,
    ExpertStatistics,
    SaliencyError,
    check_keep,
    expert_blocks,
    experts_to_keep,
    load_statistics,
    measure,
    save_statistics,
    token_groups,
    weights_fingerprint,
)
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, EXPERTS, TOP_K, calibration_items, pruning_model, write_repository


IDENTITY = {"model": "m" * 64, "data": "d" * 64}
SUMS = ("tokens", "pairs", "probability", "norm", "squared_norm", "weighted_norm")


@pytest.fixture(scope="module")
def processor():
    return lean_processor()


@pytest.fixture(scope="module")
def model(tiny_settings, processor):
    return pruning_model(tiny_settings, processor)


def brute_force(model, processor, items) -> dict[str, torch.Tensor]:
    """Every sum in fp64 by loops over items one by one, tokens and experts; nothing of the code under test runs."""
    shape = (BLOCKS, len(GROUPS), EXPERTS)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in SUMS[1:]}
    sums["tokens"] = torch.zeros(shape[:2], dtype=torch.float64)
    seen = {}
    handles = [
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, out, n=n: seen.update({n: out.double()}))
        for n, layer in enumerate(model.language_model.layers)
    ]
    for item in items:
        features = processor([item.value], instruction=processor.embedding["prompts"].get(item.side) or "")
        with torch.no_grad():
            model(**features)
        groups = [*features["mm_token_type_ids"][0].tolist()[:-1], POOLED]
        for number, layer in enumerate(model.language_model.layers):
            for group, state in zip(groups, seen[number], strict=True):
                _add_token(sums, number, group, layer.mlp, state)
    for handle in handles:
        handle.remove()
    return sums


def _add_token(sums, number, group, block, state) -> None:
    logits = block.gate.weight.detach().double() @ state
    probability = (logits - logits.max()).exp()
    probability /= probability.sum()
    chosen = sorted(range(EXPERTS), key=lambda e: -probability[e].item())[:TOP_K]
    share = sum(probability[e] for e in chosen)
    sums["tokens"][number, group] += 1
    for expert in range(EXPERTS):
        sums["probability"][number, group, expert] += probability[expert]
        if expert not in chosen:
            continue
        gate_up = block.experts.gate_up_proj[expert].detach().double()
        gate, up = (gate_up @ state).split(gate_up.shape[0] // 2)
        output = block.experts.down_proj[expert].detach().double() @ (gate / (1 + (-gate).exp()) * up)
        norm = output.square().sum().sqrt()
        sums["pairs"][number, group, expert] += 1
        sums["norm"][number, group, expert] += norm
        sums["squared_norm"][number, group, expert] += norm**2
        sums["weighted_norm"][number, group, expert] += probability[expert] / share * norm


def assert_same_sums(found: ExpertStatistics, wanted: dict[str, torch.Tensor], rtol: float) -> None:
    for name in SUMS:
        torch.testing.assert_close(getattr(found, name).double(), wanted[name], rtol=rtol, atol=rtol, msg=name)


def assert_same_bits(found: ExpertStatistics, wanted: ExpertStatistics) -> None:
    assert found.items == wanted.items
    for name in SUMS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_statistics_equal_a_loop_over_tokens_and_experts(model, processor, tmp_path):
    items = calibration_items(9)
    found = measure(model, processor, items, IDENTITY, tmp_path / "s.safetensors", batch_size=4, progress=False)
    wanted = brute_force(model, processor, items)
    assert_same_sums(found, wanted, rtol=2e-5)
    assert (found.tokens > 0).all(), "every group must be in the test's items"
    tokens, pairs = wanted["tokens"].sum(1)[:, None], wanted["pairs"].sum(1)
    expected = {
        "frequency": pairs / tokens,
        "probability": wanted["probability"].sum(1) / tokens,
        "man": wanted["norm"].sum(1) / pairs.clamp_min(1),
        "msan": wanted["squared_norm"].sum(1) / pairs.clamp_min(1),
        "reap": wanted["weighted_norm"].sum(1) / pairs.clamp_min(1),
    }
    assert set(expected) == set(SALIENCIES)
    for name, scores in expected.items():
        torch.testing.assert_close(found.scores(name), scores, rtol=2e-5, atol=2e-5)
    orders = {name: tuple(experts_to_keep(found.scores(name), 4).flatten().tolist()) for name in SALIENCIES}
    assert len(set(orders.values())) > 2, "the saliencies must differ on these items, or the test says little"


def test_experts_that_nothing_is_routed_to_score_zero(model, processor, tmp_path):
    items = [CalibrationItem("a", "document", "a")]
    found = measure(model, processor, items, IDENTITY, tmp_path / "s.safetensors", progress=False)
    assert_same_sums(found, brute_force(model, processor, items), rtol=2e-5)
    never = found.never_routed()
    assert never.any(dim=1).all() and (found.tokens.sum(1) < EXPERTS // TOP_K).all()
    for name in SALIENCIES:
        scores = found.scores(name)
        assert scores.isfinite().all()
        assert (scores[~never] > 0).all()
        assert name == "probability" or (scores[never] == 0).all()


def test_few_rows_at_once_change_nothing(model, processor, tmp_path, monkeypatch):
    """Memory is bounded by the rows whose expert outputs are held at once."""
    items = calibration_items(8)
    whole = measure(model, processor, items, IDENTITY, tmp_path / "whole", batch_size=8, progress=False)
    monkeypatch.setattr(saliency, "ROWS_AT_ONCE", 16)
    rows, blocks = [], expert_blocks(model)
    handles = [b.experts.register_forward_pre_hook(lambda _, args: rows.append(args[1].shape)) for b in blocks]
    parts = measure(model, processor, items, IDENTITY, tmp_path / "parts", batch_size=8, progress=False)
    for handle in handles:
        handle.remove()
    measured = [shape for shape in rows if shape[1] == 1]
    assert max(shape[0] for shape in measured) == 16 * TOP_K < whole.tokens[0].sum()
    assert_same_sums(parts, {name: getattr(whole, name).double() for name in SUMS}, rtol=1e-6)


def test_a_model_that_waits_on_the_disk_is_measured_to_the_same_bits(tiny_settings, processor, tmp_path):
    folder, items = write_repository(tmp_path / "r", tiny_settings), calibration_items(4)
    whole = AutoModel.from_pretrained(folder, trust_remote_code=True)
    places = dict.fromkeys(("visual", "language_model.embed_tokens", "language_model.rotary_emb"), "cpu")
    places |= dict.fromkeys(("language_model.layers", "language_model.norm"), "disk")
    waiting = AutoModel.from_pretrained(
        folder, trust_remote_code=True, device_map=places, offload_folder=str(tmp_path / "offload")
    )
    assert expert_blocks(waiting)[0].experts.down_proj.is_meta
    found = measure(waiting, processor, items, IDENTITY, tmp_path / "a", progress=False)
    assert_same_bits(found, measure(whole, processor, items, IDENTITY, tmp_path / "b", progress=False))


def test_a_budget_in_the_configuration_is_not_measured(model, processor, tmp_path, monkeypatch):
    items = calibration_items(4)
    whole = measure(model, processor, items, IDENTITY, tmp_path / "whole", progress=False)
    monkeypatch.setattr(model.config, "adaptive_compute", {"top_k": 1})
    assert_same_bits(measure(model, processor, items, IDENTITY, tmp_path / "s", progress=False), whole)


def test_each_side_has_its_prompt(model, tmp_path):
    processor = lean_processor()
    processor.embedding = processor.embedding | {"prompts": {"query": "find what is like this", "document": ""}}
    items = [CalibrationItem("same", side, side) for side in ("query", "query", "document")]
    found = measure(model, processor, items, IDENTITY, tmp_path / "s", progress=False)
    assert_same_sums(found, brute_force(model, processor, items), rtol=2e-5)
    alone = {
        side: measure(model, processor, [item], IDENTITY, tmp_path / side, progress=False).tokens[0].sum()
        for side, item in (("query", items[0]), ("document", items[2]))
    }
    assert alone["query"] > alone["document"]
    assert found.tokens[0].sum() == 2 * alone["query"] + alone["document"]


def test_groups_follow_the_packing_on_either_padding_side(processor):
    values = ["a longer text", {"image": torch.zeros(3, 32, 32, dtype=torch.uint8).permute(1, 2, 0).numpy()}]
    right = processor(values)
    left = lean_processor(padding_side="left")(values)
    groups = [token_groups(f["mm_token_type_ids"], f["attention_mask"]) for f in (right, left)]
    assert torch.equal(*groups)
    lengths = right["attention_mask"].sum(1)
    assert groups[0].tolist() == [0] * (lengths[0] - 1) + [POOLED] + [0] + [1] * 4 + [0] * (lengths[1] - 6) + [POOLED]


def test_the_hooks_are_gone_after_an_error(model, processor, tmp_path):
    with pytest.raises(Exception, match="item 0"):
        measure(model, processor, [CalibrationItem(object(), "query", "x")], IDENTITY, tmp_path / "s", progress=False)
    assert all(not block._forward_pre_hooks for block in expert_blocks(model))


def known_statistics() -> ExpertStatistics:
    statistics = ExpertStatistics.zeros(2, 3)
    statistics.tokens[:] = torch.tensor([6, 0, 0, 2])
    statistics.pairs[:, 0], statistics.pairs[:, POOLED] = torch.tensor([6, 4, 2]), torch.tensor([0, 2, 2])
    statistics.weighted_norm[:, 0] = torch.tensor([12.0, 4.0, 1.0])
    statistics.weighted_norm[:, POOLED] = torch.tensor([0.0, 2.0, 6.0])
    return statistics


def test_scores_of_some_tokens():
    statistics = known_statistics()
    both = torch.tensor([2.0, 1.0, 1.75]).double()
    pooled = torch.tensor([0.0, 1.0, 3.0]).double()
    torch.testing.assert_close(statistics.scores("reap"), torch.stack([both, both]))
    torch.testing.assert_close(statistics.scores("reap", ["pooled"]), torch.stack([pooled, pooled]))
    torch.testing.assert_close(statistics.scores("reap", last_block_pooled=True), torch.stack([both, pooled]))
    torch.testing.assert_close(statistics.scores("frequency", ["pooled"])[0], torch.tensor([0.0, 1.0, 1.0]).double())
    assert torch.equal(statistics.scores("reap", ["video"]), torch.zeros(2, 3).double())


def test_ties_go_to_the_lower_index():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert experts_to_keep(scores, 3).tolist() == [[0, 1, 3], [0, 1, 4]]
    assert experts_to_keep(scores, 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    many = torch.arange(256).remainder(2).expand(3, 256)  # an unstable sort shows in long rows only
    assert experts_to_keep(many, 130).tolist() == [sorted([*range(1, 256, 2), 0, 2])] * 3


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: known_statistics().scores("reep"), "no saliency 'reep'; did you mean 'reap'"),
        (lambda: known_statistics().scores("reap", ["sound"]), r"no tokens \['sound'\]"),
        (lambda: check_keep(3, 16, 4), r"keep is 3, but each token runs 4 experts .*: keep 4 to 16"),
        (lambda: check_keep(17, 16, 4, "sweep"), "sweep is 17, but there are 16 experts"),
        (lambda: experts_to_keep(torch.zeros(2, 4), 5), "keep is 5, but must be from 1 to 4"),
    ],
)
def test_mistakes_are_named(call, match):
    with pytest.raises(SaliencyError, match=match):
        call()


def test_a_killed_measurement_goes_on_to_the_same_bits(model, processor, tmp_path, monkeypatch):
    items = calibration_items(10)
    whole = measure(model, processor, items, IDENTITY, tmp_path / "whole", batch_size=2, progress=False)
    path = tmp_path / "killed.safetensors"
    monkeypatch.setattr(saliency, "SAVE_SECONDS", -1.0)
    child = os.fork()
    if child == 0:
        try:
            calls = []

            def die(*_):
                calls.append(1)
                if len(calls) == 4:
                    os.kill(os.getpid(), signal.SIGKILL)

            model.register_forward_pre_hook(die)
            measure(model, processor, items, IDENTITY, path, batch_size=2, progress=False)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    left = load_statistics(path)
    assert 0 < left.items < len(items) and not left.complete
    forwards = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    resumed = measure(model, processor, items, IDENTITY, path, batch_size=2, progress=False)
    handle.remove()
    assert_same_bits(resumed, whole)
    assert_same_bits(load_statistics(path), whole)
    assert len(forwards) == 3, "what was measured before the kill was measured again"


def test_only_the_rest_of_a_measurement_depends_on_the_batches(model, processor, tmp_path):
    items, path = calibration_items(6), tmp_path / "s"
    whole = measure(model, processor, items, IDENTITY, path, batch_size=2, progress=False)
    assert_same_bits(measure(model, processor, items, IDENTITY, path, batch_size=5, progress=False), whole)
    save_statistics(replace(whole, items=2), path)
    with pytest.raises(SaliencyError, match="another batch size"):
        measure(model, processor, items, IDENTITY, path, batch_size=5, progress=False)


@pytest.mark.parametrize(("key", "match"), [("model", "another model"), ("data", "other calibration data")])
def test_statistics_of_something_else_are_refused(model, processor, tmp_path, key, match):
    items, path = calibration_items(2), tmp_path / "s"
    measure(model, processor, items, IDENTITY, path, progress=False)
    with pytest.raises(SaliencyError, match=f"{match}.*{key} .*remove the file"):
        measure(model, processor, items, IDENTITY | {key: "0" * 64}, path, progress=False)


def test_no_items_and_broken_files_are_named(model, processor, tmp_path):
    with pytest.raises(SaliencyError, match="calibration_data"):
        measure(model, processor, [], IDENTITY, tmp_path / "s", progress=False)
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(SaliencyError, match=r"broken cannot be read .*remove the file"):
        load_statistics(tmp_path / "broken")


def test_the_fingerprint_is_that_of_the_weights(tmp_path, tiny_settings):
    folder = write_repository(tmp_path / "a", tiny_settings)
    first = weights_fingerprint(folder)
    assert first == weights_fingerprint(write_repository(tmp_path / "b", tiny_settings, adaptive_compute={"top_k": 1}))
    assert first != weights_fingerprint(write_repository(tmp_path / "c", tiny_settings, seed=1))
    key, tensor = sorted(read_checkpoint(folder).items())[-1]
    with open(tensor.file, "r+b") as file:
        file.seek(tensor.offset + tensor.num_bytes - 1)
        byte = file.read(1)
        file.seek(tensor.offset + tensor.num_bytes - 1)
        file.write(bytes([byte[0] ^ 1]))
    assert first != weights_fingerprint(folder), f"a changed bit of {key} goes unseen"

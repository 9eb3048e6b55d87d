"""The mask sweep against pruned repositories, and the verb from recipe to report, repository and errors."""

import json

import numpy as np
import pytest
import torch

from moemb.trainers import cli, corpus, prune_experts
from moemb.trainers.evaluation_encoding import CachedEncoder
from moemb.trainers.evaluation_metrics import rank_queries
from moemb.trainers.prune_experts_sweep import (
    SweepError,
    SweepPoint,
    SweepTask,
    TaskEvaluation,
    kept_experts,
    masked_experts,
    sweep_experts,
    sweep_markdown,
    sweep_report,
    sweep_tasks,
)
from moemb.trainers.quickstart_model import load_model
from moemb.trainers.saliency import (
    ExpertStatistics,
    SaliencyError,
    expert_blocks,
    load_statistics,
    weights_fingerprint,
)
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, EXPERTS, TOP_K, calibration_items, pruning_model, write_repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    return write_repository(tmp_path_factory.mktemp("repository") / "tiny", tiny_settings)


@pytest.fixture
def statistics():
    """Random sums: every saliency keeps other experts."""
    found = ExpertStatistics.zeros(BLOCKS, EXPERTS, {"items": "5", "data": "d" * 64})
    generator = torch.Generator().manual_seed(4)
    found.items = 5
    found.tokens[:], found.pairs[:] = 9, torch.randint(1, 9, found.pairs.shape, generator=generator)
    for name in ("probability", "norm", "squared_norm", "weighted_norm"):
        setattr(found, name, torch.rand(found.pairs.shape, generator=generator).double())
    return found


def logits_of(model, item) -> list[torch.Tensor]:
    with torch.no_grad():
        return model(**lean_processor()([item]), output_router_logits=True).router_logits


def test_a_sweep_masks_what_each_saliency_drops_and_nothing_afterwards(tiny_settings, statistics):
    model = pruning_model(tiny_settings, lean_processor())
    item = calibration_items(4)[1].value
    seen = sweep_experts(
        model, statistics, [4, 8, 2, 4], lambda keep: logits_of(model, item), ["reap", "man", "random"]
    )
    assert [(point.experts, point.saliency) for point in seen] == [
        (8, ""),
        *((count, name) for count in (4, 2) for name in ("reap", "man", "random")),
    ]
    for point in seen:
        for block, logits in enumerate(point.result):
            alive = torch.isfinite(logits)
            assert (alive == alive[0]).all()
            assert alive[0].nonzero().squeeze(1).tolist() == point.keep[block].tolist()
            assert point.keep.shape == (BLOCKS, point.experts)
    assert len({tuple(point.keep.flatten().tolist()) for point in seen}) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(logits_of(model, item), seen[0].result, strict=True))
    best = statistics.scores("reap")[0].argsort(descending=True)[:4].sort().values
    assert seen[1].keep[0].tolist() == best.tolist()


def test_the_mask_goes_when_the_evaluation_fails(tiny_settings, statistics):
    model = pruning_model(tiny_settings, lean_processor())

    def fail(keep):
        if keep.shape[1] < EXPERTS:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        sweep_experts(model, statistics, [4], fail)
    assert all(not block.gate._forward_hooks for block in expert_blocks(model))


def test_the_control_is_drawn_by_the_seed(statistics):
    draws = [kept_experts(statistics, "random", 4, seed=seed).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_only_the_last_block_depends_on_the_pooled_tokens(statistics):
    both, pooled = (kept_experts(statistics, "reap", 4, flag) for flag in (False, True))
    assert torch.equal(both[:-1], pooled[:-1]) and not torch.equal(both[-1], pooled[-1])


@pytest.mark.parametrize(
    ("experts", "saliencies", "match"),
    [
        ([1], ["reap"], "sweep is 1, but each token runs 2"),
        ([9], ["reap"], "sweep is 9, but there are 8"),
        ([4], ["repa"], "no saliency 'repa'; did you mean 'reap'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(tiny_settings, statistics, experts, saliencies, match):
    model = pruning_model(tiny_settings, lean_processor())
    with pytest.raises(SaliencyError, match=match):
        sweep_experts(model, statistics, experts, lambda keep: pytest.fail("it ran"), saliencies)


def test_masks_that_do_not_fit_are_refused(tiny_settings):
    model = pruning_model(tiny_settings, lean_processor())
    for keep, error, match in (
        (torch.arange(4).expand(3, 4), SweepError, "the model has 8 blocks"),
        (torch.zeros(BLOCKS, 1, dtype=torch.long), SaliencyError, f"each token runs {TOP_K} experts"),
    ):
        with pytest.raises(error, match=match), masked_experts(model, keep):
            pytest.fail("it was masked")


def task(name: str = "things", count: int = 12) -> SweepTask:
    rng = np.random.default_rng(0)
    documents = [{"image": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)} for _ in range(count)]
    return SweepTask(name, [{"text": f"thing {n}"} for n in range(count)], documents, [[n] for n in range(count)])


def test_vectors_under_a_mask_are_those_of_the_pruned_repository(repository, statistics, tmp_path):
    """The sweep's cache must not mix masks up, and what it ranks is what a pruned repository returns."""
    from moemb.trainers.prune_experts_repository import write_pruned_repository

    model, _ = load_model(str(repository))
    evaluation = TaskEvaluation(model, "f" * 64, [task()], tmp_path / "cache")
    points = sweep_experts(model[0].model, statistics, [4], evaluation, ["reap", "man"])
    for point in points[1:]:
        record = {"model": "tiny", "saliency": point.saliency, "items": 5}
        folder = write_pruned_repository(repository, tmp_path / point.saliency, point.keep, record)
        pruned, _ = load_model(str(folder))
        encoder = CachedEncoder(pruned, point.saliency, tmp_path / "other", progress=False)
        queries = encoder.encode(task().queries, "query")
        documents = encoder.encode(task().documents, "document")
        wanted = rank_queries(lambda a, b, q=queries, d=documents: q[a:b] @ d.T, task().relevant)
        np.testing.assert_array_equal(point.result["things"].rank, wanted.rank)
    assert len({tuple(point.result["things"].rank) for point in points}) == 3


def ranks(*values: int):
    """Ranks of queries over twenty documents, the first of which is right and stands at each of `values`."""
    scores = np.tile(-np.arange(20.0), (len(values), 1))
    scores[:, 0] = [0.5 - rank for rank in values]
    return rank_queries(lambda start, stop: scores[start:stop], [[0]] * len(values))


def test_a_report_holds_means_and_paired_changes():
    tasks = [task("a", 4), task("b", 4)]
    assert ranks(1, 2, 4).rank.tolist() == [1, 2, 4]
    whole = SweepPoint("", 8, torch.zeros(1, 8), {"a": ranks(1, 1, 1, 1), "b": ranks(1, 2, 4, 4)})
    half = SweepPoint("reap", 4, torch.zeros(1, 4), {"a": ranks(1, 1, 2, 2), "b": ranks(1, 2, 4, 4)})
    report = sweep_report([whole, half], tasks, samples=500, seed=0)
    first, second = report["points"]
    assert first["change"]["R@1"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert second["tasks"]["a"]["R@1"]["value"] == 0.5 and second["mean"]["R@1"] == pytest.approx(0.375)
    assert second["change"]["R@1"]["value"] == pytest.approx(-0.25)
    low, high = second["change"]["R@1"]["interval"]
    assert -0.5 <= low < -0.25 < high <= 0
    assert second["change"]["MRR"]["value"] == pytest.approx(-0.125)
    text = sweep_markdown(report | {"model": "tiny", "command": "moemb", "items": 5})
    assert "| 8 | all | 62.5 |" in text and "| 4 | reap | 37.5 |" in text and "**b**: 4 queries x 4 documents" in text


def test_tasks_of_a_sweep(fake_corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "load_corpus", lambda folder: fake_corpus)
    tasks = sweep_tasks(["validation"], None, None, 0)
    assert {found.name.removeprefix("validation: ") for found in tasks} > {"image", "strip", "gloss"}
    assert all(len(found.queries) == len(found.relevant) and found.documents for found in tasks)
    with pytest.raises(SweepError, match="sweep_tasks is empty"):
        sweep_tasks([], None, None, 0)
    with pytest.raises(SweepError, match="'wiki', which is not there: build it with"):
        sweep_tasks(["wiki"], tmp_path, None, 0)


@pytest.fixture
def recipe(repository, tmp_path, monkeypatch):
    """A recipe over the tiny repository and a file of items."""
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    lines = [{"text": f"item {number}", "side": ("query", "document")[number % 2]} for number in range(8)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path = tmp_path / "prune.yaml"
    path.write_text(
        f"model: {repository}\nkeep: 4\noutput: {tmp_path / 'small'}\n"
        f"calibration_data: {{{tmp_path / 'items.jsonl'}: 6}}\nbatch_size: 3\nbootstrap_samples: 50\n",
        encoding="utf-8",
    )
    return path


def verb(recipe, *flags: str) -> int:
    return cli.main(["prune-experts", "--config", str(recipe), *flags])


def test_from_a_recipe_to_a_repository(recipe, tmp_path, capsys, monkeypatch):
    assert verb(recipe) == 0
    out = capsys.readouterr().out
    assert "6 items, tokens per block:" in out and "text, 6 pooled" in out and "4 experts per block" in out
    record = json.loads((tmp_path / "small" / "expert_pruning.json").read_text())
    (file,) = (tmp_path / "cache" / "saliency").iterdir()
    statistics = load_statistics(file)
    assert record["kept"] == kept_experts(statistics, "reap", 4).tolist()
    assert record["model_weights"] == statistics.identity["model"] and record["items"] == 6
    model, _ = load_model(str(tmp_path / "small"))
    assert model.encode(["a text"]).shape == (1, 64)
    # a second repository from the same measurement: nothing is measured again
    monkeypatch.setattr(prune_experts, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert verb(recipe, "--output", str(tmp_path / "man"), "--saliency", "man", "--keep", "2") == 0
    assert verb(recipe, "--output", str(tmp_path / "spread"), "--device", "auto", "--batch_size", "4") == 0
    known = ["--statistics", str(file), "--calibration_data", "{}"]
    assert verb(recipe, *known, "--output", str(tmp_path / "again")) == 0
    again = json.loads((tmp_path / "again" / "expert_pruning.json").read_text())
    assert again["kept"] == record["kept"]


def test_from_a_recipe_to_a_curve(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prune_experts, "sweep_tasks", lambda *_: [task("a"), task("b", 5)])
    flags = ["--sweep", "8,4,2", "--sweep_saliencies", "[reap, random]", "--report", str(tmp_path / "curve.json")]
    assert verb(recipe, *flags) == 0
    first = json.loads((tmp_path / "curve.json").read_text())
    assert [(point["experts"], point["saliency"]) for point in first["points"]] == [
        (8, ""), (4, "reap"), (4, "random"), (2, "reap"), (2, "random")
    ]  # fmt: skip
    assert [found["name"] for found in first["tasks"]] == ["a", "b"]
    assert (tmp_path / "curve.md").read_text() in capsys.readouterr().out
    assert not (tmp_path / "small").exists(), "a sweep writes no repository"
    monkeypatch.setattr(CachedEncoder, "_forward", lambda *_: pytest.fail("encoded again"))
    assert verb(recipe, *flags) == 0
    assert json.loads((tmp_path / "curve.json").read_text())["points"] == first["points"]


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--keep", "1"], "keep is 1, but each token runs 2 experts"),
        (["--keep", "9"], "keep is 9, but there are 8 experts"),
        (["--sweep", "4,9"], "sweep is 9, but there are 8 experts"),
        (["--sweep", "4,x"], "--sweep"),
        (["--saliency", "reep"], "no saliency 'reep'; did you mean 'reap'"),
        (["--calibration_data", "{}"], "calibration_data is empty"),
        (["--output", "null"], "keep is set but output is not"),
        (["--kepe", "4"], "unknown key 'kepe' on the command line; did you mean 'keep'"),
        (["--model", "nowhere/at/all"], "model nowhere/at/all is neither a folder nor a Hub id"),
        (["--last_block_tokens", "some"], "must be one of"),
        (["--max_shard_gb", "0"], "max_shard_gb is 0.0, but must be finite and above 0"),
    ],
)
def test_mistakes_cost_no_measurement(recipe, capsys, monkeypatch, flags, match):
    monkeypatch.setattr(prune_experts, "measure", lambda *_, **__: pytest.fail("measured"))
    assert verb(recipe, *flags) == 1
    error = capsys.readouterr().err
    assert match in error and error.startswith("moemb prune-experts: error:") and len(error.splitlines()) == 1


def test_an_existing_target_and_statistics_of_another_model_are_refused(
    recipe, tmp_path, capsys, tiny_settings, monkeypatch
):
    file = str(tmp_path / "s.safetensors")
    assert verb(recipe, "--statistics", file) == 0
    # from here on all is refused before calibration items are even read
    monkeypatch.setattr(prune_experts, "read_calibration_data", lambda *_: pytest.fail("items were read"))
    monkeypatch.setattr(prune_experts, "weights_fingerprint", lambda *_: pytest.fail("weights were read"))
    assert verb(recipe, "--statistics", file) == 1
    assert "exists already; remove it or choose another output" in capsys.readouterr().err
    monkeypatch.setattr(prune_experts, "weights_fingerprint", weights_fingerprint)
    other = write_repository(tmp_path / "other", tiny_settings, seed=1)
    flags = ["--model", str(other), "--statistics", file, "--output", str(tmp_path / "x")]
    for extra in ([], ["--calibration_data", "{}"]):
        assert verb(recipe, *flags, *extra) == 1
        error = capsys.readouterr().err
        assert "s.safetensors were measured with another model" in error and "remove the file" in error
    assert not (tmp_path / "x").exists()

"""Quality of many policies on the same items: vectors as served, FLOPs as executed, intervals that are paired."""

import numpy as np
import pytest
import torch

from modeling_moemb.compute_moemb import Flops, count_flops
from moemb.trainers import dial_quality
from moemb.trainers.dial_policies import Policy, Prepared
from moemb.trainers.dial_quality import DialQuality, item_batches, quality_report
from moemb.trainers.evaluation_encoding import EncodingError, encoder_input, item_key
from moemb.trainers.evaluation_metrics import METRICS, rank_queries
from moemb.trainers.prune_experts_sweep import SweepTask
from moemb.trainers.quickstart_model import load_model

from .pruning_repository import BLOCKS, write_repository


BASE = Prepared("full compute", Policy(), {})
FEWER = Prepared("top-1", Policy({"top_k": 1}), {"top_k": 1})
DROPPED = Prepared("beta", Policy(), {"token_pruning": {"layer": 4, "keep": 0.5}})
PRUNED = Prepared("pruned", Policy(experts=4), {}, torch.arange(4).expand(BLOCKS, 4))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, tiny_settings):
    folder = write_repository(tmp_path_factory.mktemp("repository") / "tiny", tiny_settings)
    return load_model(str(folder))[0]


def pictures(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"image": rng.integers(0, 256, (32, 64, 3), dtype=np.uint8)} for _ in range(count)]


@pytest.fixture(scope="module")
def tasks():
    documents = pictures(7)
    clips = [{"video": np.random.default_rng(n).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)} for n in range(3)]
    return [
        SweepTask("things", [{"text": f"thing {n}"} for n in range(7)], documents, [[n] for n in range(7)]),
        SweepTask("shared", [{"text": "thing 0"}, *pictures(2, 1)], [*documents[:4], *clips], [[0], [1], [5]]),
    ]


@pytest.fixture
def quality(encoder, tasks, tmp_path):
    model, processor = encoder[0].model.eval(), encoder[0].processor
    return DialQuality(model, processor, "f" * 64, tasks, tmp_path / "kept", batch_size=4, progress=False)


def test_each_distinct_item_stands_in_one_batch(tasks):
    apart = list(item_batches(tasks, {"query": "find", "document": ""}, 4))
    seen = [(batch.prompt, key) for batch in apart for key in batch.keys]
    assert len(seen) == len(set(seen)) == 9 + 10  # "thing 0" and four pictures stand in both tasks
    assert all(item_key(item) == key for batch in apart for key, item in zip(batch.keys, batch.items, strict=True))
    assert max(len(batch.keys) for batch in apart) == 4
    one_pool = list(item_batches(tasks, {"query": "", "document": ""}, 100))
    assert len(one_pool) == 1 and len(one_pool[0].keys) == 19
    assert [b.identity for b in item_batches(tasks[::-1], {"query": "find", "document": ""}, 4)] == [
        batch.identity for batch in apart
    ]


@pytest.mark.parametrize("policy", [BASE, FEWER, DROPPED, PRUNED], ids=lambda policy: policy.name)
def test_vectors_are_those_that_are_served(quality, encoder, tasks, policy):
    outcome = quality.run([policy])[policy.name]
    for task in tasks:
        for side, items in (("query", task.queries), ("document", task.documents)):
            encode = encoder.encode_query if side == "query" else encoder.encode_document
            with policy.applied(encoder[0].model):
                served = encode([encoder_input(item) for item in items], adaptive_compute=policy.budget)
            kept = np.stack([outcome.vectors[quality.prompts[side], item_key(item)] for item in items])
            np.testing.assert_allclose(kept, served, atol=2e-6)
    others = quality.run([BASE])[BASE.name]
    different = max(np.abs(others.vectors[key] - vector).max() for key, vector in outcome.vectors.items())
    assert (different > 1e-3) == (policy is not BASE)


def test_flops_are_those_of_every_distinct_item_alone(quality):
    for policy in (BASE, FEWER, DROPPED):
        outcome, alone, pairs = quality.run([policy])[policy.name], Flops(), 0
        for batch in quality.batches:
            for item in batch.items:
                features = quality.processor([encoder_input(item)], instruction=batch.prompt)
                with torch.no_grad():
                    record = quality.model(
                        **features, adaptive_compute=policy.budget, pooled_only=True, output_compute=True
                    ).compute  # fmt: skip
                alone += count_flops(quality.model.config, record)
                pairs += int(record.expert_pairs.sum())
        assert outcome.flops == alone and outcome.pairs == pairs


def test_a_run_goes_on_and_a_new_policy_runs_alone(quality, monkeypatch):
    done = []
    forward = DialQuality._forward

    def counted(self, batch, features, policy):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((policy.name, batch.identity))
        return forward(self, batch, features, policy)

    monkeypatch.setattr(DialQuality, "_forward", counted)
    with pytest.raises(KeyboardInterrupt):
        quality.run([BASE, FEWER])
    first = list(done)
    done.clear()
    monkeypatch.setattr(DialQuality, "_forward", lambda *a: (done.append((a[3].name, a[1].identity)), forward(*a))[1])
    both = quality.run([BASE, FEWER])
    assert len(first) + len(done) == 2 * len(quality.batches) and not set(first) & set(done)
    done.clear()
    again = quality.run([BASE, FEWER, DROPPED])
    assert {name for name, _ in done} == {"beta"}
    for name in both:
        assert again[name].flops == both[name].flops
        assert all(np.array_equal(again[name].vectors[key], vector) for key, vector in both[name].vectors.items())
    path = next(quality.folder.rglob("*.npz"))
    path.write_bytes(path.read_bytes()[:50])
    done.clear()
    quality.run([BASE, FEWER, DROPPED])
    assert len(done) == 1
    assert not list(quality.folder.rglob("*.partial"))


def test_preprocessing_is_done_once_for_all_policies(quality, monkeypatch):
    made = []
    features = DialQuality.features
    monkeypatch.setattr(DialQuality, "features", lambda self, batch: (made.append(batch), features(self, batch))[1])
    quality.run([BASE, FEWER, DROPPED])
    assert len(made) == len(quality.batches)
    made.clear()
    quality.run([BASE, FEWER, DROPPED])
    assert not made


def test_the_vision_tower_sees_each_batch_once(quality):
    seen = []
    tower = quality.model.visual.patch_embed
    hook = tower.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    quality.run([BASE, FEWER, DROPPED])
    with_media = sum(
        any(kind in item for item in batch.items) for batch in quality.batches for kind in ("image", "video")
    )
    assert len(seen) == with_media > 1
    features = quality.features(next(batch for batch in quality.batches if "image" in batch.items[0]))
    quality.model(**features, pooled_only=True)
    quality.model(**features, pooled_only=True)
    hook.remove()
    assert len(seen) == with_media + 2, "what is remembered must be forgotten after the run"


def test_a_vector_that_is_not_finite_names_policy_and_item(quality, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "normalize", lambda vectors, dim: vectors * float("nan"))
    with pytest.raises(EncodingError, match="policy 'top-1': the vector of .* is not finite"):
        quality.run([FEWER])


def test_ranks_are_those_of_the_cosines(quality, tasks):
    outcome = quality.run([BASE])[BASE.name]
    ranks = quality.ranks(outcome)["shared"]
    task = tasks[1]
    left = np.stack([outcome.vectors[quality.prompts["query"], item_key(item)] for item in task.queries])
    right = np.stack([outcome.vectors[quality.prompts["document"], item_key(item)] for item in task.documents])
    for query, (row, relevant) in enumerate(zip(left @ right.T, task.relevant, strict=True)):
        assert ranks.rank[query] == 1 + sum(score >= row[relevant[0]] for score in np.delete(row, relevant[0]))


def ranks(values: list[int], pool: int = 20):
    scores = np.tile(-np.arange(float(pool)), (len(values), 1))
    scores[:, 0] = [0.5 - rank for rank in values]
    return rank_queries(lambda start, stop: scores[start:stop], [[0]] * len(values))


def report_of(first: list[int], second: list[int], clusters=None, samples: int = 4000):
    task = SweepTask("a", [{}] * len(first), [{}] * 20, [[0]] * len(first), clusters=clusters)
    return quality_report({"base": {"a": ranks(first)}, "less": {"a": ranks(second)}}, [task], samples, seed=0)


def test_means_changes_and_chance():
    task_a = SweepTask("a", [{}] * 4, [{}] * 20, [[0]] * 4)
    task_b = SweepTask("b", [{}] * 2, [{}] * 10, [[0]] * 2)
    found = {
        "base": {"a": ranks([1, 1, 1, 2]), "b": ranks([1, 2], 10)},
        "less": {"a": ranks([1, 1, 2, 2]), "b": ranks([2, 2], 10)},
    }
    report = quality_report(found, [task_a, task_b], 300, seed=1)
    base, less = report["policies"]["base"], report["policies"]["less"]
    assert base["tasks"]["a"]["R@1"]["value"] == 0.75 and base["mean"]["R@1"]["value"] == pytest.approx(0.625)
    assert less["change"]["R@1"]["value"] == pytest.approx(-0.375)
    assert base["change"]["R@1"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert [task["chance"]["R@10"] for task in report["tasks"]] == pytest.approx([0.5, 1.0])
    assert set(less["change"]) == set(METRICS)
    low, high = less["change"]["MRR"]["interval"]
    assert low <= less["change"]["MRR"]["value"] <= high <= 0


def test_a_change_is_paired():
    """Two policies that differ on one query of forty: unpaired intervals would be as wide as those of the means."""
    generator = np.random.default_rng(0)
    first = [int(rank) for rank in generator.integers(1, 3, 40)]
    second = list(first)
    second[first.index(1)] = 2
    report = report_of(first, second)
    low, high = report["policies"]["less"]["change"]["R@1"]["interval"]
    assert -0.08 <= low < -1 / 40 <= high == 0
    mean_low, mean_high = report["policies"]["less"]["mean"]["R@1"]["interval"]
    assert mean_high - mean_low > 0.25


def test_intervals_are_those_of_a_plain_bootstrap():
    first = [1, 2, 1, 3, 1, 1, 2, 1, 1, 2] * 3
    values = np.array([rank == 1 for rank in first], dtype=float)
    generator = np.random.default_rng(5)
    plain = [values[generator.integers(0, 30, 30)].mean() for _ in range(4000)]
    wanted = np.percentile(plain, [2.5, 97.5])
    found = report_of(first, first)["policies"]["base"]["tasks"]["a"]["R@1"]["interval"]
    np.testing.assert_allclose(found, wanted, atol=0.035)


def test_queries_of_one_cluster_are_drawn_together():
    first = [1] * 12 + [2] * 12
    apart = report_of(first, first)["policies"]["base"]["mean"]["R@1"]["interval"]
    together = report_of(first, first, clusters=[n // 6 for n in range(24)])["policies"]["base"]["mean"]["R@1"]
    assert together["interval"][1] - together["interval"][0] > 1.5 * (apart[1] - apart[0])
    assert together["interval"] == [0.0, 1.0]
    assert dial_quality._ROWS_AT_ONCE < 4000, "several slices must make one set of resamples"

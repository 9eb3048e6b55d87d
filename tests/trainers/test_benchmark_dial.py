"""`moemb bench --config`: conversion from known times, the verb on a random and on a real tiny model, the recipes."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from modeling_moemb import MoEMBConfig
from modeling_moemb.compute_moemb import count_flops, record_of_shapes
from moemb.trainers import benchmark_dial, benchmark_dial_inputs, benchmark_dial_timing, cli
from moemb.trainers.benchmark_dial import conversion_goals
from moemb.trainers.benchmark_dial_config import DialBenchConfig
from moemb.trainers.benchmark_dial_inputs import RandomInputs, baseline, threshold_on_batch
from moemb.trainers.benchmark_dial_timing import ScopeClock, time_policies, work_of
from moemb.trainers.benchmark_models import build_pair, image_item, model_settings, packed_batch
from moemb.trainers.benchmark_report import BenchmarkError, CaseStore
from moemb.trainers.benchmark_timing import Interleaved, Protocol, Timing
from moemb.trainers.dial_policies import BASELINE, Policy, Prepared, check_policies
from moemb.trainers.dial_quality import DialQuality
from moemb.trainers.prune_experts_sweep import SweepTask
from moemb.trainers.recipe import load_recipe

from .pruning_repository import write_repository


ROOT = Path(__file__).parents[2]
TOP = Prepared("top-1", Policy({"top_k": 1}), {"top_k": 1})
BETA = Prepared("beta", Policy(), {"token_pruning": {"layer": 1, "keep": 0.5}})
LOOPED = [
    Prepared("loop", Policy(execution="loop"), {}),
    Prepared("top-1, loop", Policy({"top_k": 1}, execution="loop"), {"top_k": 1}),
]


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    monkeypatch.setattr(benchmark_dial, "_bandwidth", lambda size: 1e10)


@pytest.fixture(scope="module")
def model():
    return build_pair("tiny", "fp32").ours


@pytest.fixture(scope="module")
def items():
    generator = torch.Generator().manual_seed(0)
    return [image_item(8, 12, 7, generator), image_item(4, 4, 3, generator)]


@pytest.fixture(scope="module")
def features(items):
    return packed_batch(items, torch.float32)


# time and work


def test_scopes_are_timed_inside_a_call_and_nothing_else_is(model, features):
    ticks = itertools.count()  # every look at the clock takes a second
    with torch.no_grad(), ScopeClock(model, lambda: float(next(ticks))) as clock:
        run = clock.timed("a", lambda: model(**features, pooled_only=True))
        run()
        run()
        model(**features, pooled_only=True)  # not timed: must not reach the samples
    assert clock.samples["a"] == [{"total": 11.0, "decoder": 9.0, "moe": 4.0}] * 2
    clock.samples["a"] = [dict.fromkeys(("total", "decoder", "moe"), float(second)) for second in (100, 1, 2, 5, 6)]
    assert [row["moe"] for row in clock.rounds("a", repeats=2, count=2)] == [1.5, 5.5], "the first was the warm-up"
    model(**features, pooled_only=True)
    assert next(ticks) == 2 * 12 + 10  # the hooks are gone


@pytest.mark.parametrize("policy", [baseline(), TOP, BETA], ids=lambda policy: policy.name)
def test_work_is_that_of_the_shapes(model, items, features, policy):
    flops, read = work_of(model, features, policy)
    record = record_of_shapes(model.config, [item.shape for item in items], policy.budget, pooled_only=True)
    assert flops == count_flops(model.config, record)
    with torch.no_grad():
        load = model(**features, adaptive_compute=policy.budget, pooled_only=True, output_compute=True)
    hit = int((load.compute.expert_load.sum(1) > 0).sum())
    dense = sum(
        4 * weight.numel()
        for name, weight in model.language_model.named_parameters()
        if "experts.gate_up" not in name and "experts.down" not in name and "embed_tokens" not in name
    )
    assert read == dense + hit * 4 * 3 * 64 * 32


def test_conversion_is_time_removed_over_flops_removed(model, features, monkeypatch):
    # the second round ran on a machine twice as slow, in the third one policy was disturbed
    seconds = {BASELINE: (2.0, 4.0, 3.0), "top-1": (1.5, 3.0, 9.0), "loop": (8.0,) * 3, "top-1, loop": (4.0,) * 3}
    shares = {"total": 1.0, "decoder": 0.5, "moe": 0.25}
    timing = Interleaved({name: Timing(9.0, 9.0, 0.0) for name in seconds}, 3, 3, True, [0, 1, 2], 0.0)

    def rounds(self, name, repeats, count):
        assert (repeats, count) == (1, 3)
        return [{scope: share * second for scope, share in shares.items()} for second in seconds[name]]

    monkeypatch.setattr(benchmark_dial_timing, "interleave", lambda *_, **__: timing)
    monkeypatch.setattr(ScopeClock, "rounds", rounds)
    found = time_policies(model, features, [baseline(), TOP, *LOOPED], Protocol(), bandwidth=1e9)
    assert (found["items"], found["tokens"], found["visual_tokens"]) == (2, features["input_ids"].numel(), 28)
    rows = found["policies"]
    removed = work_of(model, features, TOP)[0].removed_from(work_of(model, features, baseline())[0])
    assert rows["top-1"]["flops_removed"] == removed and 0 < removed["decoder"] < removed["moe"] < 1
    for scope in shares:
        assert rows["top-1"]["time_removed"][scope] == pytest.approx(0.25)
        assert rows["top-1"]["conversion"][scope] == pytest.approx(0.25 / removed[scope])
        assert rows["top-1, loop"]["conversion"][scope] == pytest.approx(0.5 / removed[scope])
        assert rows["loop"]["conversion"][scope] is None
        assert rows["top-1"]["time_removed_quartiles"][scope] == pytest.approx([-2.0, 0.25])
    assert rows["top-1"]["seconds"] == {"total": 3.0, "decoder": 1.5, "moe": 0.75}
    assert rows["top-1"]["qps"] == pytest.approx(2 / 3)
    assert rows["top-1"]["floor_seconds"] == rows["top-1"]["weight_bytes"] / 1e9


def test_goals_hold_where_they_are_asked():
    policies = {
        BASELINE: Policy(),
        "top-4": Policy({"top_k": 4}),
        "skip": Policy(skip_rate=0.57),
        "beta": Policy({"token_pruning": {"layer": 1, "keep": 0.5}}),
        "both": Policy({"top_k": 4, "token_pruning": {"layer": 1, "keep": 0.5}}),
        "mask": Policy({"top_k": 4}, execution="masking"),
        "loop": Policy({"top_k": 4}, execution="loop"),
    }

    def goals(visual: int, tokens: int, conversion: float) -> dict:
        rows = {name: {"conversion": {"decoder": conversion}} for name in policies}
        found = {"visual_tokens": visual, "tokens": tokens, "policies": rows}
        return {goal["what"].split(":")[0]: goal["met"] for goal in conversion_goals(found, policies)}

    assert goals(2048, 2400, 0.8) == {}
    assert goals(4096, 4800, 0.8) == {"beta": False, "mask": False}
    assert goals(16384, 19000, 0.8) == {"top-4": True, "skip": True, "beta": False, "mask": False}
    assert goals(16384, 19000, 0.05) == {"top-4": False, "skip": False, "beta": False, "mask": True}


@pytest.mark.parametrize(("base", "rate"), [({}, 0.5), ({"token_pruning": {"layer": 1, "keep": 0.5}}, 0.3)])
def test_a_threshold_on_a_batch_skips_the_wanted_rate(model, base, rate):
    generator = torch.Generator().manual_seed(1)
    batch = packed_batch([image_item(16, 16, 9, generator) for _ in range(3)], torch.float32)
    budget, found = threshold_on_batch(model, batch, base, rate, tolerance=0.01)
    runs = []
    for used in (budget, base):
        with torch.no_grad():
            record = model(**batch, adaptive_compute=used, pooled_only=True, output_compute=True).compute
        runs.append(int(record.expert_pairs.sum()))
    assert 1 - runs[0] / runs[1] == pytest.approx(found) and abs(found - rate) <= 0.01
    with pytest.raises(BenchmarkError, match=r"no threshold skips 0\.9999"):
        threshold_on_batch(model, batch, {}, 0.9999, tolerance=1e-6)


# the verb on a random model


RECIPE = """
model: width-tiny
dtype: fp32
policies:
  top-1: {adaptive_compute: {top_k: 1}}
  skip: {skip_rate: 0.5}
  beta: {adaptive_compute: {token_pruning: {layer: 1, keep: 0.5}}}
  half: {experts: 4, saliency: random}
  masked: {adaptive_compute: {token_pruning: {layer: 1, keep: 0.5}}, execution: masking}
  loop: {execution: loop}
sizes: [32, 64]
image: [8, 8]
think_tokens: 2
think_items: 2
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "speed.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def bench(recipe, *flags: str) -> int:
    return cli.main(
        ["bench", "--config", str(recipe), "--output", str(recipe.parent / "out"), "--rounds", "1", *flags]
    )


def result_of(recipe) -> dict:
    return json.loads((recipe.parent / "out" / f"{recipe.stem}.json").read_text(encoding="utf-8"))


def test_speed_of_a_random_model(recipe, capsys, monkeypatch):
    assert bench(recipe) == 0
    found = result_of(recipe)
    assert [case["visual_tokens"] for case in found["sizes"]] == [32, 64]
    assert list(found["sizes"][0]["policies"]) == [BASELINE, "top-1", "skip", "beta", "half", "masked", "loop"]
    rows = found["sizes"][1]["policies"]
    assert rows["masked"]["flops_removed"] == rows["beta"]["flops_removed"] != {}
    assert rows["half"]["flops_removed"]["total"] == pytest.approx(0)
    calibrated = {policy["name"]: policy["calibrated"] for policy in found["policies"]}["skip"]
    assert abs(calibrated["skip_rate"] - 0.5) <= 0.005
    assert found["think"]["tokens"] == 2 and found["think"]["check"]["least_cosine"] > 0.999
    table = (recipe.parent / "out" / "speed.md").read_text()
    assert "Dishonest on purpose: masked: computed and multiplied by zero" in table and "## Think-then-embed" in table
    assert (recipe.parent / "out" / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "thinking 2 tokens" in capsys.readouterr().out

    monkeypatch.setattr(benchmark_dial, "time_policies", lambda *_: pytest.fail("timed again"))
    assert bench(recipe) == 0
    assert result_of(recipe)["sizes"] == found["sizes"]


def test_a_killed_run_goes_on_and_failures_are_told(recipe, capsys, monkeypatch):
    put, stored = CaseStore.put, []

    def killed(self, name, result):
        if stored:
            raise KeyboardInterrupt
        stored.append(name)
        return put(self, name, result)

    monkeypatch.setattr(CaseStore, "put", killed)
    few = ["--only", "top-1", "--think_tokens", "0"]
    assert bench(recipe, *few) == 130 and stored == ["32"]
    monkeypatch.setattr(CaseStore, "put", put)
    timed, time_size = [], benchmark_dial._time_size

    def broken(config, inputs, policies, protocol, size, *rest):
        timed.append(size)
        raise MemoryError("not\nenough")

    monkeypatch.setattr(benchmark_dial, "_time_size", broken)
    assert bench(recipe, *few) == 1 and timed == [64]
    assert "64 failed: MemoryError: not enough" in capsys.readouterr().err
    assert "Failed: MemoryError" in (recipe.parent / "out" / "speed.md").read_text()
    monkeypatch.setattr(benchmark_dial, "_time_size", time_size)
    assert bench(recipe, *few) == 0


def test_policies_can_be_picked_and_keys_overridden(recipe, capsys):
    assert bench(recipe, "--list") == 0
    assert capsys.readouterr().out.split() == ["top-1", "skip", "beta", "half", "masked", "loop"]
    assert bench(recipe, "--only", "top", "beta", "--sizes", "[64]", "--think_tokens", "0", "--no-plots") == 0
    found = result_of(recipe)
    assert list(found["sizes"][0]["policies"]) == [BASELINE, "top-1", "beta"] and len(found["sizes"]) == 1
    assert found["think"] is None and not (recipe.parent / "out" / "speed.png").exists()


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--size", "[64]"], "unknown key 'size' on the command line; did you mean 'sizes'"),
        (["--only", "bata"], "nothing is named or starts with 'bata'; did you mean 'beta'"),
        (["--sizes", "[0]"], r"sizes is [0], but each must be at least 1"),
        (["--sizes", "[]"], "there is nothing to measure"),
        (["--tasks", "[strip]"], "whose weights are random: leave tasks and candidates out"),
        (["--image", "[3, 4]"], "image is [3, 4], but must be two even numbers"),
        (["--policies", "{}"], "policies is empty"),
        (["--policies", "{a: {adaptive_compute: {top_k: 9}}}"], "policy 'a': `adaptive_compute['top_k']` must be"),
        (["--policies", "{a: {top_k: 2}}"], "unknown key 'top_k' in"),
        (["--policies", "{a: {execution: hiding}}"], "must be one of"),
        (["--policies", "{full compute: {}}"], "give the policy another name"),
        (["--policies", "{a: {experts: 4}}"], "policy 'a': the experts of a random model are all alike"),
        (["--model", "nowhere/at/all", "--tasks", "[strip]", "--policies", "{a: {}}"], "nowhere/at/all"),
        (["--model", "moemb-mini"], "sizes needs tasks"),
        (["--clock", "cpu"], "add --threads 1"),
    ],
)
def test_mistakes_cost_no_measurement(recipe, capsys, monkeypatch, flags, match):
    monkeypatch.setattr(benchmark_dial, "time_policies", lambda *_: pytest.fail("timed"))
    assert bench(recipe, *flags) == 1
    error = capsys.readouterr().err
    assert match in error and error.startswith("moemb bench: error:") and len(error.splitlines()) == 1


def test_a_suite_has_no_keys(capsys):
    assert cli.main(["bench", "--suite", "kernels", "--sizes", "[3]"]) == 1
    assert "unknown argument '--sizes'; keys of a recipe go with --config" in capsys.readouterr().err


def test_quick_shrinks_everything():
    config = DialBenchConfig(
        "width-true", {"a": Policy()}, sizes=[4096, 8192], think_tokens=64, calibration_data={"x.jsonl": 1}
    )
    quick = config.quick()
    assert quick.model == "width-tiny" and quick.sizes == [32] and quick.think_tokens == 3
    assert RandomInputs(quick).features(32)["input_ids"].shape[1] < 400


# the verb on a trained model


@pytest.fixture
def real(tmp_path, tiny_settings, monkeypatch):
    """A recipe over a tiny repository, with one task to report on and one to choose on."""
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    folder = write_repository(tmp_path / "tiny", tiny_settings)
    rng = np.random.default_rng(0)

    def task(name: str, count: int) -> SweepTask:
        documents = [{"image": rng.integers(0, 256, (32, 64, 3), dtype=np.uint8)} for _ in range(count)]
        return SweepTask(name, [{"text": f"{name} {n}"} for n in range(count)], documents, [[n] for n in range(count)])

    known = {"report": task("report", 9), "choose": task("choose", 7)}
    monkeypatch.setattr(benchmark_dial_inputs, "sweep_tasks", lambda names, *_: [known[name] for name in names])
    lines = [{"text": f"item {n}", "side": ("query", "document")[n % 2]} for n in range(8)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path = tmp_path / "dial.yaml"
    path.write_text(
        f"model: {folder}\ntasks: [report]\nchoose_on: [choose]\nmost_loss: 100\n"
        "policies:\n  top-1: {adaptive_compute: {top_k: 1}}\n  half: {experts: 4}\n"
        "  masked: {adaptive_compute: {top_k: 1}, execution: masking}\n"
        "candidates:\n  little: {adaptive_compute: {token_pruning: {layer: 4, keep: 0.75}}}\n"
        "  much: {adaptive_compute: {top_k: 1, token_pruning: {layer: 4, keep: 0.25}}}\n"
        f"calibration_data: {{{tmp_path / 'items.jsonl'}: 6}}\n"
        "sizes: [4]\nbatch_size: 4\nbootstrap_samples: 50\nmetric: R@1\n",
        encoding="utf-8",
    )
    return path


def test_quality_choice_and_speed_of_a_model(real, capsys, monkeypatch):
    assert bench(real) == 0
    found = result_of(real)
    assert list(found["quality"]["policies"]) == [BASELINE, "top-1", "half", "chosen: much"]
    assert [task["name"] for task in found["quality"]["tasks"]] == ["report"]
    assert found["choice"]["tasks"] == ["choose"] and found["choice"]["chosen"] == "much"
    assert [row["name"] for row in found["choice"]["candidates"]] == ["little", "much"]
    work = found["work"]
    assert work["top-1"]["pairs_removed"] == pytest.approx(0.5) and work["half"]["pairs_removed"] == 0
    assert work["chosen: much"]["flops_removed"]["decoder"] > work["top-1"]["flops_removed"]["decoder"] > 0
    assert list(found["sizes"][0]["policies"]) == [BASELINE, "top-1", "half", "masked", "chosen: much"]
    assert found["sizes"][0]["items"] == 4 and found["sizes"][0]["visual_tokens"] > 0
    table = (real.parent / "out" / "dial.md").read_text()
    assert "## Quality" in table and "| **much** |" in table and "| chance |" in table
    assert "at a loss of at most 100 points of R@1" in table

    monkeypatch.setattr(DialQuality, "_forward", lambda *_: pytest.fail("encoded again"))
    assert bench(real, "--only", "top-1") == 0
    assert list(result_of(real)["quality"]["policies"]) == [BASELINE, "top-1", "chosen: much"]


def test_nothing_is_chosen_when_all_lose_too_much(real, capsys, monkeypatch):
    monkeypatch.setattr(
        benchmark_dial,
        "quality_report",
        lambda ranks, *_: {"policies": {name: {"change": {"R@1": {"value": -0.02, "interval": [-0.03, -0.01]}}}
                                        for name in ranks}},
    )  # fmt: skip
    (config,) = load_recipe(real, DialBenchConfig, overrides=["--most_loss", "1.9"])
    chosen, record = benchmark_dial.choose(config, benchmark_dial_inputs.RealInputs(config))
    assert chosen is None and record["chosen"] is None and len(record["candidates"]) == 2
    (config,) = load_recipe(real, DialBenchConfig, overrides=["--most_loss", "2.0"])
    chosen, _ = benchmark_dial.choose(config, benchmark_dial_inputs.RealInputs(config))
    assert chosen.name == "chosen: much"


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--choose_on", "[report]"], "choose_on and tasks share ['report']"),
        (["--calibration_data", "{}"], "policy 'half' needs calibration_data"),
        (["--sizes", "[10]"], "sizes has 10, but the tasks hold 9 distinct documents"),
        (["--candidates", "{top-1: {}}"], "'top-1' stands in policies and in candidates"),
        (["--candidates", "{a: {execution: loop}}"], "candidate 'a' has the execution 'loop'"),
    ],
)
def test_mistakes_with_a_model_are_named(real, capsys, flags, match):
    assert bench(real, *flags) == 1
    error = capsys.readouterr().err
    assert match in error.splitlines()[-1] and "Traceback" not in error


def test_items_are_drawn_by_the_seed(real):
    (config,) = load_recipe(real, DialBenchConfig)
    inputs = benchmark_dial_inputs.RealInputs(config)
    first, again = inputs.features(4), inputs.features(4)
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    config.seed = 1
    assert not torch.equal(inputs.features(4)["pixel_values"], first["pixel_values"])


# the recipes


@pytest.mark.parametrize("name", ["moemb-mini/dial", "moemb-mini/bench", "bench/width-true"])
def test_the_recipes_fit_their_models(name):
    (config,) = load_recipe(ROOT / "recipes" / f"{name}.yaml", DialBenchConfig)
    if config.random:
        settings = model_settings(config.random)
    else:
        settings = json.loads((ROOT / "recipes/moemb-mini/checkpoint/config.json").read_text(encoding="utf-8"))
    model = MoEMBConfig.from_dict(settings) if not config.random else MoEMBConfig(**settings)
    check_policies({**config.policies, **config.candidates}, model.text_config)
    executions = {policy.execution for policy in config.policies.values()}
    assert name.endswith("dial") or executions == {"removal", "masking", "loop"}

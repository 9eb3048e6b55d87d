"""The verb, whole models side by side, and what a benchmark leaves behind."""

import importlib
import json
import stat
import sys
from pathlib import Path

import pytest
import torch

from modeling_moemb.kernels_moemb import KernelRow
from moemb.trainers import (
    benchmark,
    benchmark_encode,
    benchmark_kernel_switch,
    benchmark_kernels,
    benchmark_train,
    cli,
)
from moemb.trainers import benchmark_report as report
from moemb.trainers.benchmark_models import build_pair, image_item, text_item
from moemb.trainers.benchmark_peers import (
    StockChoice,
    agreement,
    best_stock,
    encode_packed,
    encode_stock,
    token_batches,
)
from moemb.trainers.benchmark_vllm_peer import VllmPeer


@pytest.fixture(scope="module")
def pair():
    return build_pair("tiny", "fp32")


@pytest.fixture(scope="module")
def items():
    generator = torch.Generator().manual_seed(0)
    texts = [text_item(length, generator) for length in (2, 65, 17, 130)]
    return [*texts, image_item(8, 12, 7, generator), image_item(4, 4, 3, generator)]


def bench(tmp_path, *flags):
    return cli.main(["bench", "--quick", "--output", str(tmp_path), "--vllm", "none", *flags])


# models


def test_both_models_share_every_weight(pair):
    theirs = dict(pair.stock.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        assert parameter.data_ptr() == theirs.pop(name).data_ptr(), name
        assert parameter.isfinite().all() and parameter.std() < 5, name
    assert not theirs


@pytest.mark.parametrize(
    "choice", [StockChoice("eager", 1), StockChoice("grouped_mm", 4), StockChoice("batched_mm", 3)]
)
def test_both_models_embed_alike_whatever_the_batches(pair, items, choice):
    ours = encode_packed(pair.ours, items, budget=64)
    assert agreement(ours, encode_stock(pair.stock, items, choice))["largest_difference"] <= 1e-5
    alone = torch.cat([encode_packed(pair.ours, [item]) for item in items])
    assert agreement(ours, alone)["largest_difference"] <= 1e-5
    assert agreement(ours, ours.roll(1, 0))["largest_difference"] > 0.01  # the measure can tell


def test_token_batches_hold_every_item_once(items):
    batches = token_batches(items, 64)
    assert sorted(place for batch in batches for place in batch) == list(range(len(items)))
    for batch in batches:
        assert len(batch) == 1 or sum(len(items[place].ids) for place in batch) <= 64
    assert len(token_batches(items, None)) == 1


def test_the_best_way_to_run_stock_is_found_and_slow_ones_are_given_up(pair, items, monkeypatch):
    from moemb.trainers import benchmark_peers

    now = [0.0]
    monkeypatch.setattr(benchmark_peers.time, "perf_counter", lambda: now[0])
    cost = {"eager": 9.0, "grouped_mm": 2.0, "batched_mm": 1.0}

    def run(some, choice, stop):
        if choice.backend == "batched_mm" and len(some) > 2:
            raise RuntimeError("out of memory")
        for _ in range(2):
            if stop():
                return None
            now[0] += cost[choice.backend] / choice.batch_size
        return True

    best, tried = best_stock(items, pair.stock, run, batch_sizes=(1, 2, 4, 64))
    assert best == StockChoice("grouped_mm", 4)
    assert tried[str(best)] == pytest.approx(1.0) and len(tried) == 9  # 64 is more than there are items
    assert tried[str(StockChoice("batched_mm", 4))] is None and tried[str(StockChoice("grouped_mm", 1))] is None


def test_one_noisy_run_does_not_choose_the_peer(pair, items, monkeypatch):
    from moemb.trainers import benchmark_peers

    now, first = [0.0], set()
    monkeypatch.setattr(benchmark_peers.time, "perf_counter", lambda: now[0])

    def run(some, choice, stop):
        disturbed = choice.backend == "grouped_mm" and choice not in first and len(some) > 2
        now[0] += 1.1 if disturbed else 0.8 if choice.backend == "grouped_mm" else 1.0
        first.add(choice) if len(some) > 2 else None
        return True

    best, tried = best_stock(items, pair.stock, run, backends=("eager", "grouped_mm"), batch_sizes=(4,))
    assert best.backend == "grouped_mm" and tried[str(best)] == pytest.approx(0.8)


def test_stock_that_never_runs_is_an_error(pair, items):
    def run(some, choice, stop):
        if len(some) > 2:
            raise RuntimeError("no")
        return True

    with pytest.raises(RuntimeError, match="none of its back-ends"):
        best_stock(items, pair.stock, run)


# vLLM


@pytest.fixture
def fake_vllm(tmp_path):
    """An interpreter whose `vllm` returns, noisily, the lengths of the items."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "config.py").write_text("class PoolerConfig:\n    def __init__(self, **settings): pass\n")
    (package / "__init__.py").write_text(
        "import json, pathlib, types\n"
        "__version__ = '0'\n"
        "class LLM:\n"
        "    def __init__(self, model, **settings):\n"
        "        print('noise on stdout')\n"
        "        folder = pathlib.Path(model)\n"
        "        assert json.loads((folder / 'config.json').read_text())['architectures']\n"
        "        assert list(folder.glob('*.safetensors'))\n"
        "    def embed(self, prompts, use_tqdm):\n"
        "        print('more noise')\n"
        "        if len(prompts) == 1: raise ValueError('one is too few')\n"
        "        make = lambda p: types.SimpleNamespace(embedding=[float(len(p['prompt_token_ids'])), 0.5])\n"
        "        return [types.SimpleNamespace(outputs=make(p)) for p in prompts]\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def test_vllm_answers_from_its_own_environment(fake_vllm, pair, items):
    peer = VllmPeer(fake_vllm, pair.stock, 1)
    folder = peer.folder.name
    try:
        assert peer.version == "0"
        assert peer.encode(items[:3]).tolist() == [[2.0, 0.5], [65.0, 0.5], [17.0, 0.5]]
        assert peer.run(items[:2]) >= 0
        with pytest.raises(report.BenchmarkError, match="ValueError: one is too few"):
            peer.run(items[:1])
        assert peer.run(items[:2]) >= 0  # an error ends nothing
    finally:
        peer.close()
    assert peer.process.returncode == 0
    assert not Path(folder).exists()


def test_vllm_that_does_not_start_says_why(fake_vllm, pair):
    (fake_vllm.parent / "vllm" / "__init__.py").write_text("raise ImportError('wrong glibc')")
    with pytest.raises(report.BenchmarkError, match="ImportError: wrong glibc"):
        VllmPeer(fake_vllm, pair.stock, 1)


# the report


def test_results_are_kept_by_case_and_conditions(tmp_path):
    store = report.CaseStore(tmp_path, "kernels", {"threads": 1})
    assert store.get("a/b") is None
    assert store.put("a/b", {"seconds": 2.0})["case"] == "a/b"
    assert store.get("a/b")["seconds"] == 2.0
    assert report.CaseStore(tmp_path, "kernels", {"threads": 2}).get("a/b") is None
    store.put("c", {"failed": "no"})
    assert store.get("c") is None and store.get("c", failed=True)["failed"] == "no"
    (path,) = tmp_path.glob("cases/kernels/a_b.json")
    path.write_text("{")
    assert store.get("a/b") is None
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-7, "0.2 us"), (1.234e-5, "12.3 us"), (0.05, "50 ms"), (0.9996, "1e+03 ms"), (12.3, "12.3 s")],
)
def test_durations_are_short(seconds, text):
    assert report.seconds_text(seconds) == text


def test_table_aligns_words_left_and_figures_right():
    lines = report.table([{"case": "a", "time": "5.0"}, {"case": "long", "time": "10.0", "note": "x"}]).splitlines()
    assert lines == ["case  time  note", "-" * 16, "a      5.0", "long  10.0  x"]


def test_goals_are_bounds_from_either_side():
    assert report.judge("x", 2.0, 2.0)["met"] and not report.judge("x", 1.9, 2.0)["met"]
    assert report.judge("x", 1.4, 1.5, at_most=True)["met"] and not report.judge("x", 1.6, 1.5, at_most=True)["met"]
    assert not report.judge("x", None, 1.0)["met"]  # no peer ran
    assert report.goal_text([report.judge("ratio", 2.7, 3.0)]) == "ratio 2.7 of 3 MISSED"


# the verb


def test_kernels_are_measured_once_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu") == 0
    table = capsys.readouterr().out
    assert "swiglu-tiny-fp32" in table and "swiglu-tiny-bf16" in table
    content = json.loads((tmp_path / "kernels.json").read_text())
    assert [case["case"] for case in content["cases"]] == ["swiglu-tiny-fp32", "swiglu-tiny-bf16"]
    assert content["machine"]["versions"]["torch"] and content["protocol"]["rounds"] == 2
    assert {row["op"] for row in content["kernels"]} >= {"experts", "swiglu"}
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")

    measured = []
    original = benchmark_kernels.run_case
    monkeypatch.setattr(
        benchmark_kernels, "run_case", lambda name, *rest: (measured.append(name), original(name, *rest))[1]
    )
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu", "rotary-tiny-fp32") == 0
    assert measured == ["rotary-tiny-fp32"]
    assert len(json.loads((tmp_path / "kernels.json").read_text())["cases"]) == 3
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu-tiny-fp32", "--fresh", "--no-plots") == 0
    assert measured[1:] == ["swiglu-tiny-fp32"]
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu-tiny-fp32", "--rounds", "1") == 0
    assert measured[2:] == ["swiglu-tiny-fp32"]  # other conditions: measured again


def test_a_failed_case_does_not_end_the_others_and_is_tried_again(tmp_path, capsys, monkeypatch):
    original = benchmark_kernels.run_case

    def broken(name, *rest):
        if name.endswith("fp32"):
            raise RuntimeError("no memory\nleft")
        return original(name, *rest)

    monkeypatch.setattr(benchmark_kernels, "run_case", broken)
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu") == 1
    captured = capsys.readouterr()
    assert "swiglu-tiny-fp32 failed: RuntimeError: no memory left" in captured.err
    assert "swiglu-tiny-bf16" in captured.out
    monkeypatch.setattr(benchmark_kernels, "run_case", original)
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu") == 0


def test_a_wrong_kernel_is_named_and_fails_the_run(tmp_path, capsys, monkeypatch):
    from moemb.trainers import benchmark_implementations

    monkeypatch.setattr(
        benchmark_implementations,
        "find_kernel",
        lambda name, *_: (lambda gate, up: gate * up) if name == "swiglu" else None,
    )
    benchmark_kernels.check_operation.cache_clear()
    try:
        assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu-tiny-fp32") == 1
    finally:
        benchmark_kernels.check_operation.cache_clear()
    captured = capsys.readouterr()
    assert "moemb kernel computes wrong results" in captured.err and "WRONG: moemb kernel" in captured.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite", "kernels", "--only", "swiglo"], "nothing is named or starts with 'swiglo'; did you mean 'swiglu"),
        (["--suite", "kernels", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--suite", "kernels", "--wait-quiet", "nan"], "--wait-quiet must be at least 0, got nan"),
        (["--suite", "kernels", "--clock", "cpu"], "add --threads 1"),
        (["--suite", "encode", "--vllm", "/nowhere/python"], "/nowhere/python: there is no such file"),
    ],
)
def test_a_wrong_call_is_one_line(tmp_path, capsys, flags, message):
    assert cli.main(["bench", "--output", str(tmp_path), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", benchmark.SUITES)
def test_list_names_the_cases(tmp_path, capsys, suite):
    assert cli.main(["bench", "--suite", suite, "--list", "--output", str(tmp_path / "none")]) == 0
    names = capsys.readouterr().out.split()
    module = importlib.import_module(f"moemb.trainers.{benchmark.SUITES[suite]}")
    assert names == module.case_names() and len(set(names)) == len(names)
    assert not (tmp_path / "none").exists()


def test_missing_matplotlib_is_told_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(benchmark_kernels, "run_case", None)
    assert bench(tmp_path, "--suite", "kernels", "--only", "swiglu") == 1
    assert 'pip install "moemb[eval]"' in capsys.readouterr().err


def test_encode_cases_measure(tmp_path, capsys):
    names = ("text-fp32", "mixed-bf16", "shared-prefix", "long", "bits-fp32", "query", "conversion-2k")
    assert bench(tmp_path, "--suite", "encode", "--rounds", "1", "--only", *names) == 0
    cases = {case["case"]: case for case in json.loads((tmp_path / "encode.json").read_text())["cases"]}
    assert sorted(cases) == sorted(names)
    text = cases["text-fp32"]
    assert all(entry["largest_difference"] <= 1e-4 for entry in text["check"].values())
    (stock,) = [name for name in text["seconds"] if name.startswith("transformers")]
    assert text["tokens_per_second"][stock] == pytest.approx(text["tokens"] / text["seconds"][stock])
    assert cases["query"]["touched_bytes"] > 0 and cases["query"]["ideal_seconds"] > 0
    conversion = cases["conversion-2k"]
    assert 0 < conversion["flops_removed"]["decoder"] < 1
    ratio = conversion["time_removed"] / conversion["flops_removed"]["decoder"]
    assert conversion["conversion"] == pytest.approx(ratio)
    assert len(cases["long"]["seconds_per_token"]) == 2 and len(cases["bits-fp32"]["goals"]) == 2
    assert "tokens/s" in capsys.readouterr().out and (tmp_path / "encode.png").exists()
    page = (tmp_path / "encode.md").read_text()
    assert page.startswith("# Speed: encode\n\nThe suite `encode`: whole models") and "| text-fp32 |" in page


def test_disagreeing_models_are_not_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_encode, "encode_packed", lambda *a, **k: encode_packed(*a, **k).roll(1, 0))
    assert bench(tmp_path, "--suite", "encode", "--only", "text-fp32", "--no-plots") == 1
    assert "disagree with transformers" in capsys.readouterr().err


def test_touched_bytes_count_dense_weights_and_hit_experts_once():
    pair = build_pair("tiny", "fp32")
    items = [text_item(2, torch.Generator().manual_seed(0))]
    size = benchmark_encode.touched_bytes(pair.ours, items)
    expert = 4 * 3 * 64 * 32
    dense = sum(
        4 * parameter.numel()
        for name, parameter in pair.stock.language_model.named_parameters()
        if "experts.gate_up" not in name and "experts.down" not in name and "embed_tokens" not in name
    )
    hit = (size - dense) / expert
    # two tokens of top-2 in three blocks, one token in the last
    assert hit == int(hit) and 3 * 2 + 2 <= hit <= 3 * 4 + 2


def test_training_steps_have_the_gradients_of_stock(tmp_path, capsys):
    assert bench(tmp_path, "--suite", "train", "--rounds", "1", "--only", "lora-fp32") == 0
    (case,) = json.loads((tmp_path / "train.json").read_text())["cases"]
    assert all(0 < value <= 1e-4 for value in case["gradient_difference"].values())
    assert case["adapters"] == 4 * 3 + 3 * 3 + 4  # shared expert of every block, Gated DeltaNet, attention


def test_other_gradients_are_found(tmp_path, capsys, monkeypatch):
    step = benchmark_train.step_packed
    monkeypatch.setattr(benchmark_train, "step_packed", lambda model, items, weight: step(model, items, 1.01 * weight))
    assert bench(tmp_path, "--suite", "train", "--only", "lora-fp32", "--no-plots") == 1
    assert "gradients differ from transformers'" in capsys.readouterr().err


def test_a_missing_gradient_is_found():
    expected = {"a": torch.ones(2), "b": torch.ones(2)}
    assert benchmark_train.gradient_difference(expected, expected) == 0
    assert benchmark_train.gradient_difference({**expected, "b": None}, expected) == float("inf")
    assert benchmark_train.gradient_difference({"a": torch.ones(2)}, expected) == float("inf")


def test_a_record_of_the_kernels_names_no_folder_of_this_machine(monkeypatch):
    row = KernelRow("linear", "cpu", (), "moemb-cpu", f"staged in this environment: {sys.prefix}/share/moemb/kernels")
    monkeypatch.setattr(benchmark_kernel_switch, "kernels_report", lambda: [row])
    (found,) = benchmark_kernel_switch.active_kernels()
    assert found["why"] == "staged in this environment: ENVIRONMENT/share/moemb/kernels"

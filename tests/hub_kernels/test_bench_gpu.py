"""The GPU benchmark runs end to end on a CPU with tiny shapes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.hub_kernels.noarch import KERNELS


SCRIPT = KERNELS / "tools" / "bench_gpu.py"


def run(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_dry_run(tmp_path):
    output = tmp_path / "report.json"
    result = run("--dry-run", "--token-rounding", "--output", output)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["device"] == "cpu" and report["dry_run"] and report["cut_off"] == []
    assert {"loop", "grouped_mm", "gated_delta_rule", "causal_conv", "rms_norm"} <= set(report["errors"])
    assert {(row["tokens"], row["kept"], row["slots"]) for row in report["experts"]} >= {(16, 16, 1), (16, 8, 4)}
    assert {"transformers_eager", "transformers_grouped_mm", "loop"} <= set(report["experts"][0]["ms"])
    assert len(report["conversion"]) == 8 and report["token_rounding"]["dropped"] > 0
    assert set(report["encode"]["items_per_second"]) >= {"kernels_top8", "torch_top2"}


def test_time_limit_and_missing_device(tmp_path):
    output = tmp_path / "report.json"
    assert run("--dry-run", "--seconds", 0, "--output", output).returncode == 0
    assert json.loads(output.read_text())["cut_off"] == ["dense_tflops", "experts", "encode", "gated_delta"]
    result = run("--output", output)
    assert result.returncode == 2 and "no CUDA device" in result.stderr


@pytest.mark.parametrize("tokens", [0, 300])
def test_token_rounding_fills_tiles(tokens):
    sys.path[:0] = [str(SCRIPT.parent), str(KERNELS / "moemb-experts" / "torch-ext")]
    from bench_gpu_experts import TILE, round_tokens_down

    index = torch.randint(0, 3, (tokens, 2))
    weight = torch.rand(tokens, 2)
    rounded = round_tokens_down(index, weight, 3)
    kept = rounded < 3
    assert torch.equal(rounded[kept], index[kept])
    for expert in range(3):
        chosen = index == expert
        assert int((rounded == expert).sum()) == int(chosen.sum()) // TILE * TILE
        if kept[chosen].any() and not kept[chosen].all():
            assert weight[chosen & kept].min() >= weight[chosen & ~kept].max()

"""The suite `rollouts`: it runs, its figures are of what it says, and wrong rollouts are no result."""

import json

from moemb.trainers import benchmark_models, cli
from moemb.trainers.grpo_actions import ActionSampler


def bench(tmp_path, *flags):
    return cli.main(["bench", "--suite", "rollouts", "--quick", "--rounds", "1", "--output", str(tmp_path), *flags])


def test_rollouts_are_measured(tmp_path, capsys):
    assert bench(tmp_path, "--only", "one-shot-fp32", "gradual-fp32") == 0
    cases = json.loads((tmp_path / "rollouts.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["one-shot-fp32", "gradual-fp32"]
    for case in cases:
        assert list(case["seconds"]) == [
            "one full forward", "8 rollouts", "8 rollouts, nothing shared", "8 full forwards"
        ]  # fmt: skip
        assert case["difference"] <= 1e-4 and 0.3 < case["saved"] < 0.9
        assert case["goals"][0]["wanted"] == 4.0
    assert "full forwards" in capsys.readouterr().out and (tmp_path / "rollouts.png").exists()
    assert benchmark_models.build_pair("tiny", "fp32").ours.gates is None


def test_rollouts_that_differ_are_no_result(tmp_path, capsys, monkeypatch):
    write = ActionSampler.write
    monkeypatch.setattr(ActionSampler, "write", lambda *given: 1 - write(*given))
    assert bench(tmp_path, "--only", "gradual-fp32", "--no-plots") == 1
    assert "differ from the same rollouts without sharing" in capsys.readouterr().err

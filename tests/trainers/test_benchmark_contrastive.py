import json

from moemb.trainers import benchmark_contrastive, cli
from moemb.trainers.contrastive_loss import ContrastiveLoss


def bench(tmp_path, *flags):
    return cli.main(["bench", "--suite", "contrastive", "--quick", "--rounds", "1", "--output", str(tmp_path), *flags])


def test_steps_have_the_gradients_of_sentence_transformers(tmp_path, capsys):
    assert bench(tmp_path, "--only", "step-fp32") == 0
    (case,) = json.loads((tmp_path / "contrastive.json").read_text())["cases"]
    assert all(0 < value <= 1e-4 for value in case["gradient_difference"].values())
    (theirs,) = [name for name in case["seconds"] if name.startswith("sentence-transformers")]
    goal = next(value for name, value in case["seconds"].items() if name != theirs)
    assert case["goals"][0]["value"] == case["seconds"][theirs] / goal and case["rows"] == 8
    assert "sentence-transformers" in capsys.readouterr().out and (tmp_path / "contrastive.png").exists()


def test_memory_is_measured_by_batch(tmp_path):
    assert bench(tmp_path, "--only", "memory", "--no-plots") == 0
    (case,) = json.loads((tmp_path / "contrastive.json").read_text())["cases"]
    assert list(case["memory"]) == ["batch 4", "batch 16"]
    assert case["goals"][0]["value"] >= 1


def test_another_loss_is_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_contrastive, "ContrastiveLoss", lambda scale: ContrastiveLoss(1.05 * scale))
    assert bench(tmp_path, "--only", "step-fp32", "--no-plots") == 1
    assert "gradients differ from Sentence Transformers'" in capsys.readouterr().err

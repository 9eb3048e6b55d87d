"""`moemb study`: runs are trained once, collapsed ones are reported, all are measured on the same items."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from moemb.trainers import study
from moemb.trainers.cli import main
from moemb.trainers.dial_policies import BASELINE
from moemb.trainers.prune_experts_sweep import SweepTask
from moemb.trainers.study_report import firing_figure, summary

from .contrastive_runs import write_data
from .pruning_repository import write_repository


TRAINING = {
    "method": "adaptive", "gates": {"keep": {"layer": 2, "width": 8}}, "targets": {"keep": 0.5}, "max_steps": 2,
    "use_cpu": True, "weights_dtype": "float32", "learning_rate": 1e-2, "logging_steps": 2, "report_to": "none",
    "batch_pairs": 4, "disable_tqdm": True, "save_strategy": "no", "keep_deployment": "fraction",
}  # fmt: skip
BROKEN = {
    "gates": {"gradual": {}}, "targets": {"gradual": 0.02}, "keep_deployment": "threshold", "learning_rate": 1.0,
    "budget_weight": 100.0, "distill_weight": 0.0, "max_steps": 60, "collapse_window": 2, "collapse_after": 2,
}  # fmt: skip


def some_tasks():
    rng = np.random.default_rng(0)
    pictures = [{"image": rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)} for _ in range(5)]
    clips = [{"video": rng.integers(0, 256, (4, 64, 48, 3), dtype=np.uint8)} for _ in range(2)]
    return [
        SweepTask("clips", [{"text": f"move {n}"} for n in range(2)], clips, [[n] for n in range(2)]),
        SweepTask("texts", [{"text": f"thing {n}"} for n in range(5)], pictures, [[n] for n in range(5)]),
        SweepTask("pictures", pictures[:3], [{"text": f"thing {n}"} for n in range(4)], [[n] for n in range(3)]),
    ]


@pytest.fixture
def recipe(tmp_path, tiny_settings, monkeypatch):
    """A study of two gates and one that breaks; trainings run in this process and are counted."""
    data = write_data(tmp_path / "data")
    text = tiny_settings["text_config"] | {"num_hidden_layers": 4}
    model = write_repository(tmp_path / "model", tiny_settings | {"text_config": text})
    (tmp_path / "keep.yaml").write_text(yaml.safe_dump({**TRAINING, "train_datasets": {"captions": data["captions"]}}))
    (tmp_path / "broken.yaml").write_text(
        yaml.safe_dump({**TRAINING, **BROKEN, "train_datasets": {"captions": data["captions"]}})
    )
    about = {
        "model": str(model), "work": str(tmp_path / "work"), "seeds": [0, 1],
        "output": str(tmp_path / "out"), "tasks": ["any"], "metric": "R@1", "layer": 2, "bootstrap_samples": 50,
        "batch_size": 4, "policies": {"top-1": {"adaptive_compute": {"top_k": 1}}},
        "runs": {
            "gate": {"recipe": "keep.yaml", "match": "beta"},
            "wide gate": {"recipe": "keep.yaml", "changes": {"targets": {"keep": 0.25}}, "group": "combination"},
            "broken": {"recipe": "broken.yaml"},
        },
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(about))
    monkeypatch.setattr(study, "sweep_tasks", lambda *_: some_tasks())
    monkeypatch.setattr(study, "cache_folder", lambda: tmp_path / "cache")
    trained = []

    def here(words, log):
        trained.append(words)
        with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            print(" 65%|######5   | 97/150 [01:00<00:33]", end="", file=file, flush=True)  # an open progress bar
            status = main(words)
            print("\n 66%|######6   | 98/150", file=file)
            return status

    monkeypatch.setattr(study, "_moemb", here)
    return path, trained


def test_a_study(recipe, tmp_path, capsys):
    path, trained = recipe
    assert main(["study", "--config", str(path)]) == 0
    assert len(trained) == 6
    result = json.loads((tmp_path / "out" / "study.json").read_text())
    rows = {row["name"]: row for row in result["table"]}
    partner = "beta at the savings of 'gate'"
    assert set(rows) == {BASELINE, "top-1", "gate", "wide gate", partner}
    assert rows["gate"]["seeds"] == 2 and len(rows["gate"]["by_seed"]) == 2
    assert rows["top-1"]["pairs_removed"] == pytest.approx(0.5) and rows[BASELINE]["change"]["interval"] == [0, 0]
    assert 0 < rows["gate"]["flops_removed"]["decoder"] < rows["wide gate"]["flops_removed"]["decoder"]
    gap = rows[partner]["flops_removed"]["decoder"] - rows["gate"]["flops_removed"]["decoder"]
    assert 0 <= gap < 0.05  # the same tokens of pictures and clips; the gate itself costs a little
    assert rows["gate"]["against_partner"]["value"] == pytest.approx(
        rows["gate"]["value"]["value"] - rows[partner]["value"]["value"]
    )
    assert [done["seed"] for done in result["stopped"]["broken"]] == [0, 1]
    stopped = result["stopped"]["broken"][0]["stopped"]
    assert "the gradual gate has collapsed" in stopped and "%|" not in stopped
    assert result["command"].startswith("moemb study --config ")
    dropped = np.array(result["firing"]["gate"]["dropped"], dtype=float)
    assert dropped.shape == (4, 3) and not dropped[:2, 1].any() and (dropped[2:, 1] == dropped[3, 1]).all()
    assert 0.4 < dropped[3, 1] <= 0.5 and 0.4 < dropped[3, 2] <= 0.5 and not dropped[:, 0].any()
    assert (tmp_path / "out" / "study.png").stat().st_size > 1000
    text = (tmp_path / "out" / "study.md").read_text()
    assert (
        "## Ways to combine actions" in text
        and "## Runs that were stopped" in text
        and text in capsys.readouterr().out
    )


def test_what_is_done_is_not_done_again(recipe, tmp_path, monkeypatch):
    path, trained = recipe
    words = ["study", "--config", str(path), "--no-plots", "--seeds", "[0]"]
    assert main(words) == 0
    first = json.loads((tmp_path / "out" / "study.json").read_text())
    count = len(trained)
    monkeypatch.setattr(study.DialQuality, "_forward", lambda *_: pytest.fail("measured again"))
    assert main(words) == 0 and len(trained) == count
    again = json.loads((tmp_path / "out" / "study.json").read_text())
    assert again["table"] == first["table"]


def test_another_failure_is_an_error(recipe, tmp_path, capsys):
    path, _ = recipe
    (tmp_path / "keep.yaml").write_text(
        yaml.safe_dump({**TRAINING, "train_datasets": {"captions": {"path": "nowhere"}}})
    )
    assert main(["study", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert "run 'gate', seed 0: data set 'captions' cannot be loaded" in error
    assert main(["study", "--config", str(path), "--runs", "{a: {recipe: no.yaml}}"]) == 1
    assert "there is no recipe" in capsys.readouterr().err


class Fixed:
    """Ranks with given values per query."""

    def __init__(self, values):
        self.values = np.array(values, dtype=float)


def test_intervals_are_over_queries_and_seeds(monkeypatch):
    monkeypatch.setattr("moemb.trainers.study_report.query_values", lambda ranks: {"R@1": ranks.values})
    from moemb.trainers.dial_quality import Outcome

    rng = np.random.default_rng(0)
    tasks = [SweepTask("a", [{}] * 40, [{}] * 40, [[0]] * 40), SweepTask("b", [{}] * 10, [{}] * 10, [[0]] * 10)]

    def entry(shift):
        values = {"a": Fixed(rng.random(40) + shift), "b": Fixed(np.full(10, 0.5 + shift))}
        return {"outcome": Outcome(pairs=10), "ranks": values}

    from modeling_moemb.compute_moemb import Flops

    entries = {BASELINE: [entry(0.0)], "run": [entry(-0.1), entry(-0.3)]}
    for runs in entries.values():
        for one in runs:
            one["outcome"].flops = Flops(vision=1, mixers=1, experts=1)
    rows = {row["name"]: row for row in summary(entries, tasks, "R@1", 400, 0)}
    means = [np.mean([e["ranks"][t].values.mean() for t in "ab"]) for e in entries["run"]]
    assert rows["run"]["value"]["value"] == pytest.approx(np.mean(means))
    assert rows["run"]["by_seed"] == pytest.approx(means)
    low, high = rows["run"]["change"]["interval"]
    base = rows[BASELINE]["value"]["value"]
    # two seeds 0.2 apart tell little: Student's t of one degree of freedom
    assert high - low == pytest.approx(2 * 12.7 * abs(means[0] - means[1]) / 2, rel=0.4)
    assert (low + high) / 2 == pytest.approx(np.mean(means) - base, abs=0.4)
    assert rows[BASELINE]["change"]["interval"] == [0, 0]


def test_a_run_and_its_partner_are_paired(monkeypatch):
    monkeypatch.setattr("moemb.trainers.study_report.query_values", lambda ranks: {"R@1": ranks.values})
    from modeling_moemb.compute_moemb import Flops
    from moemb.trainers.dial_quality import Outcome

    tasks, values = [SweepTask("a", [{}] * 200, [{}] * 200, [[0]] * 200)], np.random.default_rng(0).random(200)
    entries = {
        name: [
            {
                "outcome": Outcome(pairs=10, flops=Flops(vision=1, mixers=1, experts=1)),
                "ranks": {"a": Fixed(values + s)},
            }
            for s in shifts
        ]
        for name, shifts in {BASELINE: [0.0], "gate": [-0.1, -0.1, -0.1], "beta": [-0.3]}.items()
    }
    rows = {row["name"]: row for row in summary(entries, tasks, "R@1", 100, 0, {"gate": "beta"})}
    assert rows["gate"]["against_partner"]["interval"] == pytest.approx([0.2, 0.2])  # query by query the same
    low, high = rows["gate"]["value"]["interval"]
    assert high - low > 0.05 and "against_partner" not in rows["beta"]


def test_batches_of_every_kind_are_looked_at():
    batches = [SimpleNamespace(items=[{kind: n}]) for kind in ("image", "text", "video") for n in range(40)][:82]
    seen = [batch.items[0] for batch in study.sample_batches(batches)]
    assert seen == [{"image": 0}, {"image": 13}, {"image": 26}, {"text": 0}, {"text": 13}, {"text": 26},
                    {"video": 0}, {"video": 1}]  # fmt: skip


def test_other_weights_of_the_same_name_are_trained_anew(recipe, tmp_path):
    path, trained = recipe
    words = ["study", "--config", str(path), "--no-plots", "--seeds", "[0]"]
    assert main(words) == 0 and len(trained) == 3
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert main(words) == 0 and len(trained) == 6


def test_no_figure_of_nothing(tmp_path):
    assert firing_figure({}, tmp_path / "f.png") is None and not list(tmp_path.iterdir())

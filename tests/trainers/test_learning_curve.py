import json

import pytest

from moemb.trainers.learning_curve import curve, markdown, read_log, write_curve


def entry(step, **values):
    return {"step": step, "cpu_hours": step / 100, **values}


LOG = [
    {"step": 10, "loss": 9.0},
    {"step": 20, "eval_score": 0.30, "eval_image_r10": 0.5, "eval_image_mrr": 0.3},
    entry(30, loss=8.0),
    entry(40, eval_score=0.45, eval_image_r10=0.7),
    # killed, and gone on from step 30: what was done twice counts once, as it went on
    entry(40, eval_score=0.40, eval_image_r10=0.6),
    entry(50, loss=6.0),
]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [*LOG[:4], entry(32, loss=7.5), *LOG[4:]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_steps_done_twice_count_as_the_run_went_on(log):
    found = curve(read_log(log))
    assert [(row["step"], row["score"]) for row in found["validation"]] == [(20, 0.30), (40, 0.40)]
    assert found["loss"] == [[10, 9.0], [30, 8.0], [32, 7.5], [50, 6.0]]
    assert found["best"]["step"] == 40 and found["best"]["sets"] == {"image": 0.6}
    assert found["validation"][0]["cpu_hours"] is None


def test_the_page_shows_few_rows_and_always_the_best_and_the_last():
    rows = [
        {"step": n, "cpu_hours": 1.0, "score": 0.5 - abs(n - 37) / 100, "sets": {"image": 0.5}} for n in range(100)
    ]
    page = markdown({"title": "x", "validation": rows, "best": rows[37]})
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(lines) <= 16 + 4
    assert "| **37** | 1.00 | 50.0 | 50.0 |" in lines and lines[-1].startswith("| 99 |")


def test_a_run_without_evaluation_has_a_page_too(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    path = write_curve(tmp_path / "log.jsonl", tmp_path / "results", "moemb train", "a model")
    assert json.loads(path.read_text())["best"] is None
    assert path.with_suffix(".png").stat().st_size > 1000 and "a model" in path.with_suffix(".md").read_text()

"""The suite `app`: its files are what it says, and a small run measures and notices mistakes."""

import hashlib
import json
from types import SimpleNamespace

import pytest

from moemb.trainers import benchmark_app, cli


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.*")
        if path.is_file()
    }


def test_no_two_files_are_the_same(tmp_path):
    made = benchmark_app.make_files(tmp_path / "a", 60)
    found = digests(tmp_path / "a")
    assert made == {"image": 33, "text": 18, "pdf": 6, "clip": 3} and len(found) == len(set(found.values())) == 60
    suffixes = [name.rpartition(".")[2] for name in found]
    assert [suffixes.count(suffix) for suffix in ("png", "md", "pdf", "gif")] == [33, 18, 6, 3]
    benchmark_app.make_files(tmp_path / "b", 20)
    again = digests(tmp_path / "b")
    assert all(found[name] == digest for name, digest in again.items() if not name.endswith(".pdf"))  # PDFs are dated


@pytest.mark.slow
def test_a_small_run_measures(tmp_path, capsys):
    assert cli.main(["bench", "--suite", "app", "--quick", "--output", str(tmp_path), "--vllm", "none"]) == 0
    (case,) = json.loads((tmp_path / "app.json").read_text())["cases"]
    assert case["files"] == 40 and sum(case["kinds"].values()) == 40 <= case["vectors"] and case["changed"] == 1
    assert len(case["seconds"]) == 6 and all(value > 0 for value in case["seconds"].values())
    assert "nothing changed" in capsys.readouterr().out and (tmp_path / "app.png").exists()


def update(indexed, unchanged, skipped=None):
    return SimpleNamespace(indexed=indexed, unchanged=unchanged, skipped=skipped or {})


@pytest.mark.parametrize(
    ("place", "wrong", "said"),
    [
        (0, update(299, 0, {"x.pdf": "broken"}), "299 of 300 files were indexed; not: {'x.pdf': 'broken'}"),
        (1, update(1, 299), "nothing changed: 1 files were embedded and 299 left, not 0"),
        (2, update(2, 298), "one file of a hundred changed: 2 files were embedded and 298 left, not 3"),
        (3, update(300, 0), "after a restart: 300 files were embedded and 0 left, not 0"),
    ],
)
def test_a_wrong_run_is_no_measurement(place, wrong, said):
    updates = [update(300, 0), update(0, 300), update(3, 297), update(0, 300)]
    assert benchmark_app._mistakes(300, *updates) == ""
    updates[place] = wrong
    assert benchmark_app._mistakes(300, *updates) == said

"""The README keeps its word: its commands exist, its example runs. The tree of CONTRIBUTING.md is the tree."""

import json
import re
from pathlib import Path

import pytest

from moemb.trainers import cli


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = ["modeling_moemb", "trainers", "recipes/moemb-mini"]


def tree_of(room: str) -> list[str]:
    """Names that the tree lists below a room."""
    block = re.search(rf"^{re.escape(room)}/.*\n((?:  .*\n)*)", CONTRIBUTING, re.MULTILINE)
    return [line.split()[0].rstrip("/") for line in block[1].splitlines()]


@pytest.mark.parametrize("room", ROOMS)
def test_the_tree_names_every_file_once(room):
    present = [p.name for p in (ROOT / room).iterdir() if not p.name.startswith((".", "__pycache__"))]
    assert sorted(tree_of(room)) == sorted(present)


def test_commands_and_flags_exist(capsys):
    calls = re.findall(r"^(moemb ([\w-]+)[^#\n]*)", README, re.MULTILINE)
    assert {verb for _, verb in calls} == set(cli.VERBS)
    for call, verb in calls:
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        text = capsys.readouterr().out
        for flag in re.findall(r"--[\w-]+", call):
            assert flag in text, f"'{call}': {verb} has no {flag}"


def test_every_linked_file_exists():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets and not missing


def test_no_placeholder_is_left():
    assert re.findall(r"FILL:\w+", README) == []


def test_the_results_are_those_of_the_report():
    report = json.loads((ROOT / "recipes/moemb-mini/results/evaluation.json").read_text(encoding="utf-8"))
    lines = {task["name"]: task["lines"][0] for task in report["tasks"]}
    row = r"^\| ([\w-]+): .*?\| (\d+) x (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, README, re.MULTILINE)
    assert len(rows) >= 9
    for name, queries, pool, first, tenth, chance in rows:
        line = lines[name]
        model = line["systems"][0]
        assert (int(queries), int(pool)) == (line["queries"], line["pool"][0]), name
        for shown, value in (
            (first, model["R@1"]["value"]), (tenth, model["R@10"]["value"]), (chance, line["chance"]["R@10"])
        ):  # fmt: skip
            assert float(shown) == pytest.approx(100 * value, abs=0.051), name


def test_the_example_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path))
    example, kernels = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(kernels, "README.md", "exec")  # not run: it takes a build that a machine without a compiler has not
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["documents"].shape == (3, names["model"].get_embedding_dimension())
    assert capsys.readouterr().out.startswith("(3, ")

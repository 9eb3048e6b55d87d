"""The documentation builds without a warning, and its results are those of the files."""

import json
import re
import subprocess
import sys

import pytest

from .pages import ROOT


pytestmark = pytest.mark.slow  # the API reference is read from all sources


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def words(page) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8")))


def test_results_and_the_commands_that_make_them(site):
    page = words(site / "results.html")
    for name in ("evaluation", "dial"):
        report = json.loads((ROOT / f"recipes/moemb-mini/results/{name}.json").read_text(encoding="utf-8"))
        assert report["command"] in page
    evaluation = json.loads((ROOT / "recipes/moemb-mini/results/evaluation.json").read_text(encoding="utf-8"))
    for task in evaluation["tasks"]:
        value = task["lines"][0]["systems"][0]["R@10"]["value"]
        assert f"{100 * value:.1f}" in page, task["name"]
    assert (site / "figures/moemb-mini-results-dial.png").is_file()


def test_the_reference_has_shapes_and_errors(site):
    model, search = words(site / "reference/model.html"), words(site / "reference/search.html")
    names = ("PackedTokens", "cu_seqlens", "(tokens,)", "validate_adaptive_compute", "ItemError", "Source code in")
    for text in names:
        assert text in model, text
    for text in ("Searcher", "QueryError", "AppConfig", "passage_characters"):
        assert text in search, text


def test_every_verb_is_described(site):
    from moemb.trainers import cli

    page = words(site / "reference/commands.html")
    for verb in cli.VERBS:
        assert f"usage: moemb {verb}" in page


def test_pages_fetch_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert [url for url in fetched if "canonical" not in url] == [], path.name

import io
import json

import numpy as np
import pytest
from PIL import Image

from moemb.trainers import corpus_evaluation
from moemb.trainers.corpus_evaluation import LOCAL_TASK_NAMES, build_evaluation_sets, load_local_task, load_local_tasks
from moemb.trainers.corpus_sources import SourceError

from .fake_packages import tgz


METAMATH = """
  $( A modus ponens inference that is
     explained at length.  (Contributed by NM, 5-Aug-1993.) $)
  ax-mp $a |- ps $.
  ${ mpd.1 $e |- ( ph -> ps ) $.
  $( A deduction form of modus ponens, used everywhere. $)
  mpd $p |- ( ph -> ch ) $= ( wi ) AB $. $}
  $( Short. $)
  short $a |- ph $.
"""


def png(colour):
    buffer = io.BytesIO()
    image = Image.new("RGBA", (60, 40), (0, 0, 0, 0))
    image.paste(colour, (10, 10, 30, 30))
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    articles = {
        str(n): {
            "title": f"Title {n}",
            "description": f"the description {n}",
            "extract": f"Article {n} " * 90,
            "topic": "x",
        }
        for n in range(5)
    }
    articles["none"] = {"title": "Short", "description": "short", "extract": "left out", "topic": "x"}
    flag = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"><rect width="4" height="1" fill="{}"/></svg>'
    countries = [
        {"name": name, "capital": capital, "continent": "x", "iso": iso, "flag_4x3": f"flags/4x3/{name}.svg"}
        for name, capital, iso in (("A", "One", True), ("B", "Two", True), ("C", None, True), ("D", "Four", False))
    ]
    stamps = "usr/share/tuxpaint/stamps/"
    archives = {
        "wiki": {"data/summaries_en-us.json": json.dumps(articles)},
        "metamath": {"databases/set.mm": METAMATH},
        "flags": {"country.json": json.dumps(countries), **{f"flags/4x3/{c}.svg": flag.format("red") for c in "ABCD"}},
        "stamps": {
            f"{stamps}animals/frog.txt": "A frog.\nfr.utf8=Une grenouille\n",
            f"{stamps}animals/frog.png": png("green"),
            f"{stamps}animals/frog2.txt": "Frog!\n", f"{stamps}animals/frog2.png": png("blue"),
            f"{stamps}alphabets/a.txt": "The letter A.\n", f"{stamps}alphabets/a.png": png("red"),
            f"{stamps}toys/top.txt": "The top\n", f"{stamps}toys/top.svg": flag.format("blue"),
        },
    }  # fmt: skip
    paths = {key: tgz(tmp_path / f"{key}.tgz", members) for key, members in archives.items()}

    def fetch(key):
        if key not in paths:
            raise SourceError(f"cannot download {key}: apt-get is not on the PATH")
        return paths[key]

    monkeypatch.setattr(corpus_evaluation, "fetch", fetch)
    return paths


def test_sets_are_built_once_and_read_as_tasks(packages, tmp_path, capsys):
    names = ["wiki", "stamps", "metamath", "flags"]
    assert build_evaluation_sets(tmp_path / "corpus", names) == {}
    capsys.readouterr()
    assert build_evaluation_sets(tmp_path / "corpus", names) == {}
    assert capsys.readouterr().out.splitlines() == [f"{name}: already built" for name in names]
    tasks = load_local_tasks(tmp_path / "corpus")
    assert set(tasks) == {"wiki", "stamps", "metamath", "flag-capital"} < set(LOCAL_TASK_NAMES)
    assert len(tasks["wiki"].queries) == 5 and len(tasks["wiki"].documents[0]["text"]) == 500
    for query, (answer,) in zip(tasks["wiki"].queries, tasks["wiki"].relevant, strict=True):
        assert tasks["wiki"].documents[answer]["text"].split()[1] == query["text"].split()[-1]
    stamps = tasks["stamps"]
    assert [query["text"] for query in stamps.queries] == ["frog", "top"] and stamps.relevant == [[0, 1], [2]]
    assert (stamps.documents[0]["image"][32, 32] == (0, 128, 0)).all()
    assert [query["text"] for query in tasks["metamath"].queries] != []
    pairs = {
        q["text"]: tasks["metamath"].documents[a[0]]["text"]
        for q, a in zip(tasks["metamath"].queries, tasks["metamath"].relevant)
    }
    assert pairs == {
        "A modus ponens inference that is explained at length.": "|- ps",
        "A deduction form of modus ponens, used everywhere.": "|- ( ph -> ch )",
    }
    flags = tasks["flag-capital"]
    assert [d["text"] for d in flags.documents] == ["One", "Two"] and flags.relevant == [[0], [1]]


def test_a_set_that_cannot_be_fetched_is_named_and_the_others_are_built(packages, tmp_path, capsys):
    failures = build_evaluation_sets(tmp_path, ["refman", "metamath"])
    assert set(failures) == {"refman"} and "apt-get" in failures["refman"]
    assert "refman: not built. cannot download" in capsys.readouterr().out
    assert load_local_task(tmp_path, "refman") is None and load_local_task(tmp_path, "metamath") is not None


def test_titles_are_read_from_a_manuals_page():
    text = (
        "64 builtins\r\nSee Also\r\nbrowser\r\n"
        "builtins Returns the Names of All Built-in\r\nObjects\r\nDescription\r\nReturn the names"
    )
    assert corpus_evaluation._topic_title("builtins", text) == "Returns the Names of All Built-in Objects"
    assert corpus_evaluation._topic_title("builtin", text) is None
    assert corpus_evaluation._topic_title("a+b(", "a+b( Odd Name\r\nDescription") == "Odd Name"


def test_pages_are_given_as_pictures_of_three_channels(tmp_path):
    (tmp_path / "eval").mkdir()
    pages = np.arange(2 * 6 * 4, dtype=np.uint8).reshape(2, 6, 4)
    np.save(tmp_path / "eval" / "refman.npy", pages)
    (tmp_path / "eval" / "refman.jsonl").write_text('{"query": "Second", "page": 1}\n')
    task = load_local_task(tmp_path, "refman")
    assert task.relevant == [[1]] and task.documents[1]["image"].shape == (6, 4, 3)
    assert (task.documents[1]["image"][..., 2] == pages[1]).all()


def test_the_sample_does_not_hang_on_the_order():
    rows = [{"query": f"q{n}", "document": f"d{n % 7}"} for n in range(40)]
    sampled = corpus_evaluation._sampled(rows, 5)
    assert len(sampled) == 5 and len({row["document"] for row in sampled}) == 5
    assert corpus_evaluation._sampled(rows[::-1], 5) != [] and sampled == corpus_evaluation._sampled(rows, 5)

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moemb.trainers import evaluation, evaluation_tasks, quickstart_model
from moemb.trainers.baselines_pretrained import MINILM, RIDGE, BaselineUnavailable
from moemb.trainers.corpus_tasks import EvaluationTask
from moemb.trainers.evaluation import EvaluateConfig, evaluate, run
from moemb.trainers.evaluation_report import NothingEvaluatedError, markdown, percent, verdict
from moemb.trainers.evaluation_tasks import (
    TASKS,
    BrokenTaskError,
    NotRun,
    TaskSource,
    UnknownTaskError,
    baseline_systems,
    check_task,
    model_systems,
    select_task_names,
)


def Task(name, queries, documents, relevant, kind="text->text", **fields):
    return EvaluationTask(name, "0", kind, "OOD", "A task.", queries, documents, relevant, "MIT", **fields)


class Encoder(torch.nn.Module):
    """Reads a text as its letters, an image as its mean colour, a clip as that of its last frame."""

    def __init__(self):
        super().__init__()
        self.prompts = {}
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.items = 0

    def encode_query(self, inputs, batch_size=32, show_progress_bar=False):
        self.items += len(inputs)
        return np.stack([self._vector(item) for item in inputs])

    encode_document = encode_query

    def _vector(self, item):
        item = {"text": item} if isinstance(item, str) else item
        vector = np.zeros(30)
        for letter in item.get("text", ""):
            vector[ord(letter) % 26] += 1
        for frames in (
            [np.asarray(item["image"])[None]] if "image" in item else [item["video"]] if "video" in item else []
        ):
            vector[26:29] += frames[-1].mean(axis=(0, 1)) / 255
        vector[29] = 1e-3
        return vector


def _colours(count, seed=0):
    rng = np.random.default_rng(seed)
    return [np.broadcast_to(colour, (8, 8, 3)).astype(np.uint8) for colour in rng.integers(0, 256, (count, 3))]


def _text_task(name="wiki", count=40, **fields):
    words = [f"{chr(97 + i % 26)}{chr(97 + (i * 7) % 26)}word{i}" for i in range(count)]
    texts = [{"text": word} for word in words]
    return Task(name, texts, texts, [[i] for i in range(count)], **fields)


@pytest.fixture
def source(monkeypatch, tmp_path):
    """Serves two tasks and reports the others as absent."""
    tasks = {"wiki": _text_task(groups={"first ten": list(range(10))}), "style": _image_task()}
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TaskSource, "load", lambda self, name: tasks.get(name) or NotRun(name, "build it"))
    return tasks


def _image_task():
    images = [{"image": image} for image in _colours(30)]
    return Task("style", images[:20], images, [[i] for i in range(20)], kind="image->image")


def _config(**fields):
    return EvaluateConfig(bootstrap_samples=50, pretrained_baselines=False, **fields)


def test_a_report_holds_every_number_with_chance_interval_and_baselines(source):
    report, output = evaluate(_config(), model=Encoder())
    assert [task["name"] for task in report["tasks"]] == ["style", "wiki"]
    assert len(report["not_run"]) == len(TASKS) - 2
    wiki = report["tasks"][1]
    assert [line["line"] for line in wiki["lines"]] == ["all", "first ten"]
    line = wiki["lines"][1]
    assert (line["queries"], line["pool"]) == (10, [40, 40])
    assert line["chance"]["R@1"] == pytest.approx(1 / 40)
    names = [system["name"] for system in line["systems"]]
    assert names == ["moemb-mini", "character TF-IDF", "BM25"]
    for system in line["systems"]:
        low, high = system["R@10"]["interval"]
        assert low <= system["R@10"]["value"] <= high
    assert json.loads(output.read_text())["seed"] == 0
    assert {"torch", "transformers", "python"} <= set(report["versions"])
    assert "**moemb-mini**" in output.with_suffix(".md").read_text()


def test_a_second_run_encodes_nothing_and_says_the_same(source):
    first, again = Encoder(), Encoder()
    one, _ = evaluate(_config(), model=first)
    two, _ = evaluate(_config(), model=again)
    assert first.items and not again.items
    assert [t["lines"] for t in one["tasks"]] == [t["lines"] for t in two["tasks"]]


def test_an_encoder_that_says_nothing_hits_nothing(source):
    model = Encoder()
    model._vector = lambda item: np.ones(30)
    report, _ = evaluate(_config(), model=model)
    for task in report["tasks"]:
        system = task["lines"][0]["systems"][0]
        assert system["R@10"]["value"] == 0.0 and system["tied_queries"] == 1.0
        assert not task["lines"][0]["verdict"]["above_chance"]


def test_an_unknown_task_is_named_before_anything_is_loaded(tmp_path):
    recipe = tmp_path / "evaluate.yaml"
    recipe.write_text("tasks: [stile]\n")
    with pytest.raises(UnknownTaskError, match="'stile'; did you mean 'style'"):
        run(argparse.Namespace(config=recipe, overrides=[], list_tasks=False))


def test_the_command_writes_files_and_names_what_did_not_run(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_model, "load_model", lambda name, device: (Encoder(), name))
    overrides = [
        "--output",
        str(tmp_path / "out" / "r.json"),
        "--tasks",
        "[wiki, refman]",
        "--bootstrap_samples",
        "20",
    ]
    overrides += ["--pretrained_baselines", "false"]
    assert run(argparse.Namespace(config=None, overrides=overrides, list_tasks=False)) == 0
    printed = capsys.readouterr().out
    assert "not run: task 9b refman: build it" in printed
    assert (tmp_path / "out" / "r.json").is_file() and (tmp_path / "out" / "r.md").is_file()


def test_list_tasks_needs_no_recipe(capsys):
    assert run(argparse.Namespace(config=None, overrides=[], list_tasks=True)) == 0
    assert " 7b  motion" in capsys.readouterr().out


def test_nothing_to_evaluate_is_an_error(source):
    with pytest.raises(NothingEvaluatedError, match="build it"):
        evaluate(_config(tasks=["refman"]), model=Encoder())


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        EvaluateConfig(batch_size=0)


def test_tasks_are_chosen_by_name_or_number_in_order():
    assert select_task_names(["7a", "2", "style"]) == ["emoji-concept", "emoji-concept-full", "style", "clip"]
    assert select_task_names([]) == list(TASKS)


def test_a_missing_local_set_names_the_command(monkeypatch, tmp_path):
    loaded = TaskSource(corpus=tmp_path / "nothing").load("wiki")
    assert isinstance(loaded, NotRun) and "moemb data --evaluation" in loaded.reason


@pytest.mark.parametrize(
    "change, match",
    [
        ({"relevant": [[0]]}, "relevant has 1 rows"),
        ({"relevant": [[99]] * 40}, "relevant of query 0"),
        ({"relevant": [[]] * 40}, "relevant of query 0"),
        ({"exclude": [[-1]] * 40}, "exclude of query 0"),
        ({"groups": {"x": [40]}}, "line 'x'"),
        ({"groups": {"x": []}}, "line 'x'"),
        ({"clusters": [0]}, "cluster"),
        ({"queries": []}, "0 queries"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(change, match):
    task = _text_task()
    for name, value in change.items():
        setattr(task, name, value)
    with pytest.raises(BrokenTaskError, match=match):
        check_task(task)


def _encode(items, side):
    model = Encoder()
    return np.stack([model._vector(item) for item in items])


def test_a_composed_query_is_shown_beside_its_parts():
    images = [{"image": image} for image in _colours(6)]
    queries = [{"image": images[0]["image"], "text": "dark"}] * 3
    task = Task("skin-edit", queries, images, [[1], [2], [3]], exclude=[[0]] * 3)
    names = [system.name for system in model_systems(task, _encode, "m")]
    assert names == ["m", "m, image alone", "m, text alone"]
    others, not_run = baseline_systems(task, _Pretrained())
    assert [(s.name, s.note) for s in others] == [
        ("raw pixels", "image of the query alone"),
        ("colour histogram", "image of the query alone"),
    ]
    assert not not_run


def test_clips_are_shown_beside_their_first_frame():
    clips = [{"video": np.stack([frame] * 4)} for frame in _colours(5)]
    for clip in clips:
        clip["video"][-1] = 0
    task = Task("clip", [{"text": "a"}] * 5, clips, [[i] for i in range(5)])
    own = model_systems(task, _encode, "m")
    assert [system.name for system in own] == ["m", "m, first frame alone"]
    assert not np.allclose(own[0].scores(0, 1), own[1].scores(0, 1))
    others, _ = baseline_systems(task, _Pretrained())
    assert [(s.name, s.note) for s in others] == [(RIDGE, "first frame of each clip")]


class _Pretrained:
    """Small stand-ins for MiniLM, the features and the ridge map."""

    def texts(self, texts):
        return np.ones((len(texts), 4), np.float32)

    def features(self, images):
        return np.stack([np.asarray(image).mean(axis=(0, 1)) for image in images])

    def ridge(self):
        return SimpleNamespace(texts=lambda v: v[:, :3], images=lambda v: v)


def test_pretrained_baselines_stand_where_they_can_read_both_sides():
    text = [{"text": "a"}] * 3
    image = [{"image": image} for image in _colours(3)]
    answers = [[0], [1], [2]]

    def names(queries, documents):
        return [s.name for s in baseline_systems(Task("t", queries, documents, answers), _Pretrained())[0]]

    assert names(text, text)[-1] == MINILM
    assert names(text, image) == [RIDGE]
    assert names(image, text) == [RIDGE]
    assert names(image, image)[2:] == ["EfficientNet features", RIDGE]


def test_a_baseline_that_cannot_run_says_why():
    pretrained = _Pretrained()

    def refuse():
        raise BaselineUnavailable("it is fitted on the corpus: run moemb data")

    pretrained.ridge = refuse
    image = [{"image": image} for image in _colours(2)]
    systems, not_run = baseline_systems(Task("t", [{"text": "a"}] * 2, image, [[0], [1]]), pretrained)
    assert systems == []
    assert not_run == [NotRun(RIDGE, "it is fitted on the corpus: run moemb data")]


def _line(model, rival, ablation=False):
    def entry(name, interval, part):
        value = sum(interval) / 2
        metric = {"value": value, "interval": list(interval)}
        return {"name": name, "note": "", "ablation": part, "R@1": metric, "R@10": metric, "MRR": metric}

    return {
        "chance": {"R@1": 0.01, "R@10": 0.1, "MRR": 0.05},
        "systems": [entry("m", model, False), entry("b", rival, ablation)],
    }


def test_a_verdict_needs_intervals_apart():
    assert verdict(_line((0.5, 0.6), (0.3, 0.49)))["above_baselines"] is True
    assert verdict(_line((0.5, 0.6), (0.3, 0.5)))["not_above"] == ["b"]
    assert verdict(_line((0.09, 0.6), (0.0, 0.0)))["above_chance"] is False
    assert verdict(_line((0.5, 0.6), (0.9, 1.0), ablation=True))["above_baselines"] is None


def test_small_shares_keep_their_digits():
    assert (percent(0.0005), percent(0.123456), percent(0.0)) == ("0.05", "12.3", "0.0")


def test_the_table_names_what_is_missing(source):
    report, _ = evaluate(_config(), model=Encoder())
    text = markdown(report)
    assert "## Not run" in text and "task 9b refman: build it" in text
    assert "first ten" in text and evaluation.HELP


def test_the_shipped_and_local_names_do_not_overlap():
    assert not set(evaluation_tasks.SHIPPED_TASKS) & set(evaluation_tasks.LOCAL_TASKS)

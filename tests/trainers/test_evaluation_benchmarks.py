import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBConfig
from moemb.trainers import cli, quickstart_model
from moemb.trainers.evaluation_benchmark_report import ResultsError, read_results, summary
from moemb.trainers.evaluation_benchmarks import BenchmarkConfig, run_benchmark, task_names
from moemb.trainers.evaluation_report import NothingEvaluatedError
from moemb.trainers.mmeb_tasks import LEADERBOARD
from moemb.trainers.model_card_results import benchmark_part, model_index
from moemb.trainers.recipe import RecipeError, load_recipe
from moemb.trainers.repository import assemble_repository

from ..modeling_moemb.embedders import build
from ..processors import lean_processor
from .benchmark_trees import BLUE, GREEN, RED, ColourModel, frames, image_tree, page_tree, table
from .test_mrmr import make as make_mrmr


RECIPES = sorted((Path(__file__).parents[2] / "recipes/benchmarks").glob("*.yaml"))
NDCG = (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))


class RunnableModel(ColourModel):
    """The colour model with all that a run asks of a model."""

    def __init__(self, config, **settings):
        super().__init__(**settings)
        self._first.model.config = config
        self.weight = torch.nn.Parameter(torch.ones(1))

    def parameters(self):
        return iter([self.weight])

    def state_dict(self):
        return {"weight": self.weight}


@pytest.fixture
def colours(tiny_settings, monkeypatch, tmp_path):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    return RunnableModel(MoEMBConfig(**tiny_settings, emb_token_id=299))


@pytest.fixture
def data(tmp_path):
    return page_tree(image_tree(tmp_path / "data"))


def settings(data, tmp_path, **changed):
    tasks = ["HatefulMemes", "MSCOCO_t2i", "GQA", "ViDoRe_docvqa"]
    return BenchmarkConfig(
        "mmeb-v2", "org/colours", **({"tasks": tasks, "data": data, "output": tmp_path / "out.json"} | changed)
    )


def test_scores_means_and_what_did_not_run(colours, data, tmp_path):
    report, output = run_benchmark(settings(data, tmp_path), "moemb evaluate", colours)
    values = {task["name"]: task["value"] for task in report["tasks"]}
    assert values == {
        "HatefulMemes": pytest.approx(2 / 3), "MSCOCO_t2i": 0.5, "ViDoRe_docvqa": pytest.approx((NDCG + 1) / 2),
    }  # fmt: skip
    (absent,) = report["not_run"]
    assert absent["name"] == "GQA" and "hf download" in absent["reason"]
    means = report["summary"]
    assert means["overall"] == {
        "value": pytest.approx(sum(values.values()) / 3), "tasks": 3, "of": 78, "complete": False,
    }  # fmt: skip
    assert means["image"]["value"] == pytest.approx((2 / 3 + 1 / 2) / 2) and means["image"]["of"] == 36
    assert means["visdoc-vidore1"]["tasks"] == 1 and "video" not in means
    assert report["mean"] is None
    low, high = report["tasks"][0]["interval"]
    assert low <= 2 / 3 <= high
    assert read_results(output) == json.loads(json.dumps(report))
    text = output.with_suffix(".md").read_text()
    assert "| HatefulMemes | image-cls | hit@1 | 66.7 (" in text and "3 of 78, not comparable" in text
    assert "GQA: the table" in text and '`instruction_placement`: `"system"`' in text


def test_a_stopped_run_goes_on_where_it_stood(colours, data, tmp_path):
    colours.fail_after = 3
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(settings(data, tmp_path, batch_size=2), model=colours)
    done = len(colours.items)
    colours.fail_after, colours.batches = None, []
    report, _ = run_benchmark(settings(data, tmp_path, batch_size=2), model=colours)
    everything = len(colours.items)
    colours.batches = []
    assert (
        run_benchmark(settings(data, tmp_path), model=colours)[0]["tasks"][0]["value"] == report["tasks"][0]["value"]
    )
    assert colours.items == []
    fresh = RunnableModel(colours._first.model.config)
    fresh.weight = torch.nn.Parameter(torch.zeros(1))  # other weights, other vectors
    run_benchmark(settings(data, tmp_path, batch_size=2), model=fresh)
    assert len(fresh.items) == done + everything


def test_nothing_to_evaluate_is_an_error_with_the_reasons(colours, tmp_path):
    with pytest.raises(NothingEvaluatedError, match="none of 1 tasks could be evaluated: GQA: the table"):
        run_benchmark(settings(tmp_path, tmp_path, tasks=["GQA"]), model=colours)


def test_the_command_reads_a_recipe(colours, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_model, "load_model", lambda name, device: (colours, name))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"benchmark: mmeb-v2\nmodel: org/colours\ntasks: [HatefulMemes]\ndata: {data}\n")
    output = tmp_path / "results/out.json"
    command = ["evaluate", "--config", str(recipe), "--output", str(output), "--conventions", "{num_frames: 4}"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "HatefulMemes: hit@1 66.7" in printed and "overall: 66.7 over 1 of 78 tasks" in printed
    assert read_results(output)["conventions"]["num_frames"] == 4
    assert cli.main(["evaluate", "--config", str(recipe), "--list-tasks"]) == 0
    assert capsys.readouterr().out == "HatefulMemes\n"
    assert cli.main(["evaluate", "--config", str(recipe), "--conventions", "{frames: 4}"]) == 1
    assert "there is no convention 'frames'" in capsys.readouterr().err


def test_mrmr_is_the_mean_of_its_columns(colours, tmp_path):
    queries = [{"id": "a", "text": "red", "category": "Music"}, {"id": "b", "text": "blue", "category": "Pharmacy"},
               {"id": "c", "text": "green", "category": "Pharmacy"}]  # fmt: skip
    corpus = [{"id": "1", "text": "red"}, {"id": "2", "text": "blue green"}, {"id": "3", "text": "blue"}]
    judged = [("a", "1", 1), ("b", "3", 1), ("c", "3", 1)]
    make_mrmr(tmp_path / "data", "knowledge", queries, corpus, judged)
    wrong = [{"id": "7_1", "text": "red"}, {"id": "7_2", "text": "blue"}]
    make_mrmr(tmp_path / "data", "negation", [{"id": "7", "image": BLUE}], wrong, [("7", "7_1", 1)])
    config = BenchmarkConfig("mrmr", "org/c", ["knowledge", "negation"], data=tmp_path / "data", output=tmp_path / "o")
    report, _ = run_benchmark(config, model=colours)
    knowledge, negation = report["tasks"]
    parts = {name: part["value"] for name, part in knowledge["parts"].items()}
    # c asks for green: document 2 is nearest, 1 and 3 tie and the right one counts as the last: 1 / log2(4)
    assert parts == {"Art": 1.0, "Medicine": pytest.approx((1 + 0.5) / 2)}
    assert (knowledge["value"], negation["value"]) == (pytest.approx(2.5 / 3), 0.0)
    assert report["summary"]["overall"]["value"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert (report["summary"]["overall"]["of"], report["summary"]["mrmr-knowledge"]["of"]) == (11, 4)
    assert not knowledge["complete"] and knowledge["expected_candidates"] == 26_223


def test_a_complete_benchmark_says_so():
    tasks = [{"group": f"a-{letter}", "value": value, "complete": True} for letter, value in (("x", 0.5), ("y", 1.0))]
    means = summary(tasks, {"a-x": 1, "a-y": 1})
    assert means["overall"] == means["a"] == {"value": 0.75, "tasks": 2, "of": 2, "complete": True}
    assert not summary([tasks[0] | {"complete": False}, tasks[1]], {"a-x": 1, "a-y": 1})["overall"]["complete"]


def test_cards_show_the_results_and_the_hub_gets_the_complete_ones(colours, data, tmp_path):
    report, _ = run_benchmark(settings(data, tmp_path), model=colours)
    assert {task["name"]: task["complete"] for task in report["tasks"]} == {
        "HatefulMemes": False, "MSCOCO_t2i": False, "ViDoRe_docvqa": True,
    }  # fmt: skip
    shown = "\n".join(benchmark_part({"mmeb.json": report}))
    assert "### MMEB-V2" in shown and "| HatefulMemes | image-cls | hit@1 | 66.7 (" in shown
    folder = tmp_path / "repository/results/benchmarks"
    folder.mkdir(parents=True)
    (folder / "mmeb.json").write_text(json.dumps(report))
    ((entry,),) = [part["results"] for part in model_index(tmp_path / "repository", "org/colours")]
    assert entry["dataset"]["type"] == "vidore/docvqa_test_subsampled_beir"
    (metric,) = entry["metrics"]
    assert (metric["type"], metric["value"]) == ("ndcg_linear@5", round(100 * (NDCG + 1) / 2, 2))


def test_a_file_that_holds_no_results_is_named(tmp_path):
    for text, message in (("{", "cannot be read"), ('{"format": "other"}', "holds no results of a public benchmark")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ResultsError, match=message):
            read_results(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"benchmarks": ["MIEB(lite)"]}, "benchmarks belongs to the benchmark mteb"),
        ({"images": "merged"}, "images belongs to the benchmark mrmr"),
        ({"benchmark": "mteb", "limit": 3}, "limit is not for mteb"),
        ({"benchmark": "mmeb"}, "must be one of"),
    ],
)
def test_settings_that_do_not_go_together_are_named(tmp_path, values, message):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"benchmark": "mmeb-v2"} | values))
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, BenchmarkConfig)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_all_tasks(path):
    (config,) = load_recipe(path, BenchmarkConfig)
    named = task_names(config)
    assert len(named) == len(set(named)) == len(config.tasks)
    if config.benchmark == "mmeb-v2":
        assert set(named) == set(LEADERBOARD)
    elif config.benchmark == "mrmr":
        assert named == ["knowledge", "theorem", "traffic", "design", "negation"]
    else:
        import mteb

        of_benchmarks = {t.metadata.name for name in config.benchmarks for t in mteb.get_benchmark(name).tasks}
        assert of_benchmarks <= set(named)
        assert {name for name in set(named) - of_benchmarks if not name.startswith("VisRAGRet")} == set()
    if path.stem == "vidore":
        assert len(named) == 10 + 4 + 10 + 6
    assert {path.stem for path in RECIPES} == {
        "mmeb-v2", "mrmr", "vidore", "mteb-text", "mteb-image", "mteb-video",
    }  # fmt: skip


@pytest.fixture(scope="module")
def tiny_repository(tmp_path_factory, tiny_settings):
    processor = lean_processor()
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return assemble_repository(folder, model=build(tiny_settings, processor), processor=processor)


def test_a_real_model_scores_what_it_scores_by_hand(tiny_repository, tmp_path, monkeypatch):
    """Pictures, a video with a text, and pages through the whole way, against plain calls of `encode`."""
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    data = page_tree(image_tree(tmp_path / "data"))
    root = data / "video-tasks/frames/video_mret/Charades_STA/v"
    for name, colour in {"query": RED, "positive": GREEN, "negative": BLUE}.items():
        frames(root / name, [colour] * 10)
    table(data / "video-tasks/Charades-STA/test.parquet", [{"query": "red", "video_path": "v.mp4"}])
    tasks = ["HatefulMemes", "Charades-STA", "ViDoRe_docvqa"]
    config = BenchmarkConfig(
        "mmeb-v2", str(tiny_repository), tasks, data=data, output=tmp_path / "o.json", device="cpu"
    )
    report, _ = run_benchmark(config)
    assert Counter(task["complete"] for task in report["tasks"]) == {False: 1, True: 2}
    assert report["model"]["parameters"]["active"] < report["model"]["parameters"]["total"]

    model = SentenceTransformer(str(tiny_repository), trust_remote_code=True, device="cpu")
    asked = "Represent the given image for classification"
    pictures = [{"image": str(data / f"image-tasks/pics/{name}.png")} for name in ("red", "green", "blue")]
    scores = model.encode(pictures, prompt=asked) @ model.encode(["red", "green", "blue"]).T
    hits = [scores[0].argmax() == 0, scores[1].argmax() == 2, scores[2][[2, 0]].argmax() == 0]
    by_hand = {"HatefulMemes": np.mean(hits)}

    saved = {name: [str(root / name / f"frame_{n}.png") for n in (1, 2, 3, 4, 6, 7, 8, 10)] for name in
             ("query", "positive", "negative")}  # fmt: skip
    asked = "Find the clip that corresponds to the described scene in the given video:"
    query = model.encode([{"video": saved["query"], "text": "red"}], prompt=asked)
    clips = model.encode([{"video": saved["positive"]}, {"video": saved["negative"]}])
    by_hand["Charades-STA"] = float((query @ clips.T)[0].argmax() == 0)
    for task in report["tasks"][:2]:
        assert task["value"] == pytest.approx(by_hand[task["name"]]), task["name"]


def test_conventions_can_be_recorded_in_a_model_of_ones_own(tiny_repository, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    data = image_tree(tmp_path / "data")
    changed = {"candidate_instruction": "task", "num_frames": 4}
    config = BenchmarkConfig(
        "mmeb-v2", str(tiny_repository), ["MSCOCO_t2i"], data=data, output=tmp_path / "o.json", device="cpu",
        conventions=changed, record_conventions=True,
    )  # fmt: skip
    run_benchmark(config)
    assert changed.items() <= json.loads((tiny_repository / "config.json").read_text())["evaluation"].items()
    config.conventions, config.record_conventions = {}, False
    assert changed.items() <= run_benchmark(config)[0]["conventions"].items()

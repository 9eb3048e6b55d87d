"""Studies: settings, intervals against a plain bootstrap, and a tiny one from pretraining to the figure."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers import ablate_runs, cli
from moemb.trainers.ablate_config import AblateConfig, AblationError, Variant
from moemb.trainers.ablate_measure import AsDataset
from moemb.trainers.ablate_report import markdown, study_quality, table_rows
from moemb.trainers.ablate_runs import Study, item_flops, items_of_step, train, with_emb_row
from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.evaluation_metrics import Ranks
from moemb.trainers.mini_contrastive_config import MiniContrastiveConfig
from moemb.trainers.pretrain_config import PretrainConfig
from moemb.trainers.recipe import RecipeError, load_recipe, read_recipe
from moemb.trainers.router_settings import RouterSettings

from .test_mini_contrastive import SETTINGS
from .test_pretrain import TINY


RECIPES = Path(__file__).parents[2] / "recipes" / "moemb-mini" / "ablations"
DENSE = {"feed_forward": "dense", "intermediate_size": 48}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_studies_of_recipes(path):
    """Every key that a variant changes is one that its training takes, with a value of the right type."""
    (config,) = load_recipe(path, AblateConfig)
    assert len(config.seeds) >= 3
    base, training = read_recipe(path.parent / config.pretrain), read_recipe(path.parent / config.train)
    if config.common is not None:
        common = read_recipe(path.parent / config.common)
        assert common["method"] == "mini-contrastive"
        check(common | config.common_settings, MiniContrastiveConfig)
    for variant in config.variants.values():
        merged = base | config.pretrain_settings | variant.pretrain
        check(merged, PretrainConfig)
        mini = training["method"] == "mini-contrastive"
        merged = training | config.train_settings | variant.train
        check(merged, *([MiniContrastiveConfig] if mini else [ContrastiveConfig, RouterSettings]))


def check(recipe, *classes):
    overrides = [f"--{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in recipe.items()]
    overrides = [o.removesuffix("\n").removesuffix("\n...") for o in overrides if not o.startswith("--method")]
    load_recipe(None, *classes, overrides=overrides)


def settings(**changes):
    values = {
        "title": "t", "output": Path("o"), "train": Path("t.yaml"), "pretrain": Path("p.yaml"), "steps": 3,
        "tasks": ["validation"], "variants": {"a": Variant(), "b": Variant()},
    }  # fmt: skip
    return values | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": None}, "give either pretrain"),
        ({"base": "moemb-mini"}, "give either pretrain"),
        ({"variants": {}}, "variants is empty"),
        ({"seeds": [1, 1]}, r"seeds is \[1, 1\]"),
        ({"metric": "NDCG"}, "metric is 'NDCG'"),
        ({"steps": 0}, "steps is 0"),
        ({"tasks": []}, "tasks is empty"),
        ({"presented": {"stile": "styles"}}, "presented names 'stile', which is not among tasks"),
        ({"variants": {"a/b": Variant()}}, "variant 'a/b': the name becomes a folder"),
        ({"variants": {"a": Variant(emb="first")}}, "variant 'a': emb is 'first'"),
        ({"variants": {"a": Variant(design={"kind": "dense"})}}, "design kind is 'dense'"),
        (
            {"variants": {"a": Variant(design={"kind": "modality", "granularty": 2})}},
            "unknown design key 'granularty'; did you mean 'granularity'",
        ),
        ({"variants": {"a": Variant(train={"seed": 3})}}, "the study sets 'seed'"),
        ({"variants": {"a": Variant()}, "axis": "x"}, "variant 'a' has no place on it"),
        ({"pretrain": None, "base": "moemb-mini", "common": Path("c.yaml")}, "common c.yaml follows pretraining"),
        ({"common_settings": {"init_from": "x"}}, "common_settings: the study sets 'init_from'"),
        (
            {"pretrain": None, "base": "moemb-mini", "variants": {"a": Variant(pretrain={"max_steps": 2})}},
            "starts from base 'moemb-mini'",
        ),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AblateConfig(**settings(**changes))


def test_a_typo_in_a_variant_is_named(tmp_path):
    path = tmp_path / "study.yaml"
    values = settings(output="o", train="t", pretrain="p", variants={"a": {"trian": {}}})
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError, match="unknown key 'trian'.*did you mean 'train'"):
        load_recipe(path, AblateConfig)


def ranks(values):
    """Every right document at a rank that makes R@1 the values."""
    rank = np.where(np.asarray(values), 1.0, 20.0)
    ones = np.ones(len(rank), dtype=np.int64)
    return Ranks(rank, rank, 30 * ones, ones)


def test_intervals_cover_queries_and_seeds():
    generator = np.random.default_rng(3)
    tasks = [
        SimpleNamespace(name="one", queries=range(60), documents=range(30), clusters=None),
        SimpleNamespace(name="two", queries=range(40), documents=range(30), clusters=np.arange(40) // 4),
    ]
    level = {"first": (0.3, 0.3, 0.3), "noisy": (0.2, 0.5, 0.8)}
    runs = {
        name: [{t.name: ranks(generator.random(len(t.queries)) < p) for t in tasks} for p in seeds]
        for name, seeds in level.items()
    }
    found = study_quality(runs, tasks, 20_000, 0)["variants"]

    def values(name):
        return [np.stack([run[t.name].rank == 1 for run in runs[name]]).astype(float) for t in tasks]

    for name in level:
        tables = values(name)
        assert found[name]["mean"]["R@1"]["value"] == pytest.approx(np.mean([t.mean() for t in tables]))
        assert found[name]["seeds"]["R@1"] == pytest.approx(np.mean([t.mean(1) for t in tables], axis=0))
        drawn = []
        for _ in range(2000):  # the plain way
            total = 0.0
            for task, table in zip(tasks, tables, strict=True):
                labels = np.arange(table.shape[1]) if task.clusters is None else task.clusters
                picked = generator.integers(0, labels.max() + 1, labels.max() + 1)
                rows = np.concatenate([np.flatnonzero(labels == c) for c in picked])
                total += table[:, rows].mean() / 2
            drawn.append(total)
        error = np.std(np.mean([t.mean(1) for t in tables], axis=0), ddof=1) / 3**0.5
        expected = np.percentile(np.tile(drawn, 10) + error * generator.standard_t(2, 20_000), [2.5, 97.5])
        np.testing.assert_allclose(found[name]["mean"]["R@1"]["interval"], expected, atol=0.06)
    assert found["first"]["change"]["R@1"] == {"value": 0.0, "interval": [0.0, 0.0]}
    widths = [np.diff(found[name]["mean"]["R@1"]["interval"])[0] for name in level]
    assert widths[1] > 1.5 * widths[0]


def test_equal_compute_counts_items_and_flops(tiny_settings):
    base = {"method": "contrastive", "batch_size": 128}
    assert items_of_step(base | {"batch_size": 64}) == 64
    assert items_of_step({"method": "contrastive"}) == 512
    half = {"method": "mini-contrastive", "emoji_chunk": 40}
    assert items_of_step({"method": "mini-contrastive"}) - items_of_step(half) == 40
    text = tiny_settings["text_config"]
    native = MoEMBConfig(**tiny_settings)
    fixed = {"num_experts": 1, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0}
    dense = MoEMBConfig(
        **tiny_settings | {"text_config": text | fixed | {"moe_intermediate_size": 96}}, feed_forward="dense"
    )
    assert 0.95 < item_flops(dense) / item_flops(native) < 1  # no router, no gate of a shared expert


@pytest.fixture
def small_study(tmp_path, fake_corpus, monkeypatch):
    """A recipe of a tiny study; trainings run in this process, and are counted."""
    ran = []

    def run_here(command, check):
        ran.append(command[-1])
        return SimpleNamespace(returncode=cli.main(command[3:]))

    monkeypatch.setattr("moemb.trainers.corpus.load_corpus", lambda path: fake_corpus)
    monkeypatch.setattr(ablate_runs, "subprocess", SimpleNamespace(run=run_here))
    quiet = {"eval_strategy": "no", "save_steps": 100}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({"method": "pretrain", **TINY, "max_steps": 2, **quiet}))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"method": "mini-contrastive", **SETTINGS, **quiet}))
    study = settings(
        output=str(tmp_path / "out"), train="c.yaml", pretrain="p.yaml", steps=2, seeds=[0, 1], bootstrap_samples=50,
        qps_items=4, qps_rounds=2, pretrain_settings={"warmup_steps": 0},
        variants={
            "dense": {"pretrain": DENSE},
            "upcycled": {"pretrain": DENSE, "design": {"kind": "upcycled", "granularity": 2, "replicas": 2}},
            "native": {"emb": "end", "steps": 1},
        },
    )  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return tmp_path / "study.yaml", ran


def test_what_is_alike_is_trained_once(tmp_path, monkeypatch):
    """Pretraining and the training in common: by their settings and seed, over variants and over studies."""
    recipes = {}

    def train(recipe, folder, final, label):
        assert recipes.setdefault(folder, recipe) == recipe
        assert recipe["output_dir"] == str(folder) and final == folder / "final"

    monkeypatch.setattr(ablate_runs, "train", train)
    for name, method in (("p", "pretrain"), ("c", "mini-contrastive"), ("t", "contrastive")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"method": method, "output_dir": name, "max_steps": 9}))

    def studied(output, **changes):
        given = {"train": tmp_path / "t.yaml", "pretrain": tmp_path / "p.yaml", "common": tmp_path / "c.yaml"}
        given |= {"pretrain_output": tmp_path / "shared", "common_settings": {"max_steps": 3}} | changes
        return Study(AblateConfig(**settings(output=tmp_path / output, **given)))

    study = studied("one")
    native, dense = Variant(), Variant(pretrain=DENSE)
    folders = [study.pretrained(variant, seed)[0] for variant in (native, dense) for seed in (0, 1)]
    assert len(set(folders)) == 4 and len(recipes) == 8
    for folder in folders:
        assert folder.parent.parent == tmp_path / "shared"
        recipe = recipes[folder.parent]
        assert recipe["method"] == "mini-contrastive" and recipe["max_steps"] == 3
        before = recipes[Path(recipe["init_from"]).parent]
        assert before["method"] == "pretrain" and before["max_steps"] == 9 and before["seed"] == recipe["seed"]
    assert ["feed_forward" in recipes[Path(recipes[f.parent]["init_from"]).parent] for f in folders] == [
        False, False, True, True,
    ]  # fmt: skip
    design = Variant(pretrain=DENSE, design={"kind": "modality"})
    assert study.pretrained(design, 1)[0] == folders[3]
    assert studied("two").pretrained(native, 0)[0] == folders[0] and len(recipes) == 8
    studied("three", common_settings={"max_steps": 4}).pretrained(native, 0)
    assert len(recipes) == 9  # the pretraining was there
    studied("four", corpus=tmp_path).pretrained(native, 0)
    assert len(recipes) == 11  # of other data
    alone = studied("five", common=None, common_settings={})
    folder = alone.pretrained(native, 0)[0].parent
    assert recipes[folder]["method"] == "pretrain" and len(recipes) == 11
    assert AblateConfig(**settings(output=tmp_path)).pretrain_output == tmp_path / "pretrain"


@pytest.mark.slow
def test_a_study_from_pretraining_to_the_figure(small_study, tmp_path, capsys):
    recipe, ran = small_study
    assert cli.main(["ablate", "--config", str(recipe)]) == 0
    # dense and upcycled share a pretraining per seed
    assert len(ran) == 2 * (2 + 3) and sum("/pretrain/" in path for path in ran) == 4
    result = json.loads((tmp_path / "out/results.json").read_text())
    assert list(result["quality"]["variants"]) == ["dense", "upcycled", "native"] and result["seeds"] == [0, 1]
    assert [result["models"][name]["steps"] for name in ("dense", "native")] == [2, 1]
    assert all(model["speed"]["median"] > 0 for model in result["models"].values())
    assert result["models"]["dense"]["active"] < result["models"]["upcycled"]["active"]  # the router
    text = (tmp_path / "out/results.md").read_text()
    assert text.count("\n| upcycled |") == 2 and "| chance |" in text
    assert (tmp_path / "out/results.png").stat().st_size > 5000
    model = MoEMBModel.from_pretrained(tmp_path / "out/runs/upcycled/seed-1/final")
    assert model.config.text_config.num_experts == 4 and model.config.pooling == "emb"
    check_emb_rows(tmp_path / "out")
    check_new_row(tmp_path / "out/runs/upcycled/seed-1/final", tmp_path)
    assert not list((tmp_path / "out").rglob("checkpoint-*"))  # nothing is kept to go on with
    assert str(tmp_path) not in (tmp_path / "out/results.json").read_text().replace(result["command"], "")
    # again: nothing runs; one more seed: only that one does; other settings: refused
    del ran[:]
    assert cli.main(["ablate", "--config", str(recipe), "--qps_items", "0"]) == 0
    assert ran == []
    elsewhere = ["--report", str(tmp_path / "pages/of.all")]
    assert cli.main(["ablate", "--config", str(recipe), "--seeds", "[0, 1, 2]", *elsewhere]) == 0
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == [
        f"of.all.{end}" for end in ("json", "md", "png")
    ]
    assert json.loads((tmp_path / "out/results.json").read_text())["seeds"] == [0, 1]
    assert len(ran) == 2 + 3 and all("seed-2" in path or "/pretrain/" in path for path in ran)
    capsys.readouterr()
    assert cli.main(["ablate", "--config", str(recipe), "--steps", "5"]) == 1
    assert "holds a run of other settings (max_steps)" in capsys.readouterr().err


def check_emb_rows(output):
    """The pooled token of "end" begins as the token that ends a document, that of "mean" near the mean."""
    near = {}
    for folder in output.glob("base/*"):
        model = MoEMBModel.from_pretrained(folder)
        table = model.get_input_embeddings().weight.float()
        row, pad = table[model.config.emb_token_id], table[model.config.text_config.pad_token_id]
        near.setdefault(model.config.feed_forward, []).append(
            ((row - pad).abs().max() == 0, (row - table.mean(0)).abs().max() < 6e-3)
        )
    assert all(end and not mean for end, mean in near["moe"] if end) and any(end for end, _ in near["moe"])
    assert all(mean and not end for end, mean in near["dense"])


def check_new_row(trained, folder):
    """A row that was trained stays with "mean", and begins at the mean with "new"."""
    rows = {}
    for emb in ("mean", "new"):
        with_emb_row(trained, folder / emb, emb, 0)
        model = MoEMBModel.from_pretrained(folder / emb)
        table = model.get_input_embeddings().weight.float()
        assert model.config.pooling == "emb"
        rows[emb] = table[model.config.emb_token_id]
    assert torch.equal(rows["mean"], MoEMBModel.from_pretrained(trained).get_input_embeddings().weight[-1])
    assert (rows["new"] - table.mean(0)).abs().max() < 6e-3 < (rows["mean"] - table.mean(0)).abs().max()


def test_a_training_that_fails_or_was_stopped_is_run_again(tmp_path, monkeypatch):
    calls, status = [], [1, 130, 0]

    def run(command, check):
        calls.append(command)
        if status[0] == 0:
            (tmp_path / "final").mkdir()
        return SimpleNamespace(returncode=status.pop(0))

    monkeypatch.setattr(ablate_runs.subprocess, "run", run)
    recipe = {"method": "pretrain", "max_steps": 2}
    with pytest.raises(AblationError, match="one: the training ended with status 1"):
        train(recipe, tmp_path, tmp_path / "final", "one")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path, tmp_path / "final", "one")
    for _ in range(2):
        train(recipe, tmp_path, tmp_path / "final", "one")
    assert len(calls) == 3 and calls[0][1:] == [
        "-m",
        "moemb.trainers.cli",
        "train",
        "--config",
        str(tmp_path / "recipe.yaml"),
    ]
    assert read_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_study_of_another_method_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text("method: pretrain\n")
    with pytest.raises(AblationError, match="has method 'pretrain', but must be contrastive or mini-contrastive"):
        Study(AblateConfig(**settings(train=tmp_path / "t.yaml")))


def test_a_data_set_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text("method: contrastive\ntrain_datasets: {captions: {path: json}}\n")
    (tmp_path / "p.yaml").write_text("method: pretrain\n")
    given = settings(train=tmp_path / "t.yaml", pretrain=tmp_path / "p.yaml", tasks=["style"])
    with pytest.raises(AblationError, match="'style' as 'caption'.*did you mean 'captions'.*it has captions"):
        Study(AblateConfig(**given, presented={"style": "caption"}))
    study = Study(AblateConfig(**given, presented={"style": "captions"}))
    assert study.instructions("captions") == {"query": None, "document": None}


@pytest.mark.parametrize("tasks", [None, ["captions", "styles"]])
def test_items_are_presented_as_their_data_set(tasks):
    """Its instruction goes with its side; routers are told the task where they know tasks, on both sides."""
    calls = []

    class Embedder(list):
        prompts = {"query": "the model's own", "document": ""}

        def encode_query(self, inputs, **settings):
            calls.append(("query", inputs, settings))

        def encode_document(self, inputs, **settings):
            calls.append(("document", inputs, settings))

    conditioning = None if tasks is None else {"kind": "id", "tasks": tasks}
    model = Embedder([SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(task_conditioning=conditioning)))])
    given = AsDataset(model, "captions", {"query": "Find it.", "document": None})
    given.encode_query(["a"], batch_size=2)
    given.encode_document(["b"])
    told = {} if tasks is None else {"router_task": "captions"}
    assert calls == [
        ("query", ["a"], {"prompt": "Find it.", "batch_size": 2, **told}),
        ("document", ["b"], {"prompt": None, **told}),
    ]
    assert given.prompts == {"query": "Find it.", "document": ""}
    assert AsDataset(model, "styles", {"query": None, "document": None}).prompts["query"] == "the model's own"


def test_tables_name_every_variant():
    tasks = [SimpleNamespace(name="one", queries=range(8), documents=range(30), clusters=None)]
    runs = {name: [{"one": ranks([True] * 4 + [False] * 4)}] * 2 for name in ("a", "b")}
    model = {"parameters": 2e6, "active": 1e6, "steps": 5, "compute": 2.0, "at": None}
    result = {
        "title": "T", "command": "moemb ablate", "metric": "R@1", "axis": None, "seeds": [0, 1],
        "models": {"a": model, "b": model | {"compute": 3.0}}, "quality": study_quality(runs, tasks, 20, 0),
        "versions": {"torch": "1"}, "common_steps": 300, "presented": {"one": "captions"}, "adapters": True,
    }  # fmt: skip
    rows = table_rows(result)
    assert [row["variant"] for row in rows] == ["a", "b", "chance"]
    assert rows[1]["training compute"] == "1.50" and rows[1]["each seed"] == "50.0 / 50.0"
    text = markdown(result)
    for words in ("2 seeds; 95 % intervals", "without the adapters", "300 steps in common", "one as captions"):
        assert words in text
    alone = markdown(result | {"seeds": [0], "common_steps": None, "presented": {}, "adapters": False})
    assert "over queries alone" in alone and not any(w in alone for w in ("adapters", "in common", "presented"))
    speed = {"median": 10.0, "quartiles": [9.0, 11.0], "items": 512, "rounds": 7, "batch_size": 64, "seed": 0,
             "threads": 2, "processor": "P"}  # fmt: skip
    timed = markdown(result | {"models": {name: model | {"speed": speed} for name in "ab"}})
    assert "| 10 (9–11) |" in timed and "512 queries and documents" in timed and "2 threads of P" in timed

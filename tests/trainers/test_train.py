import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from modeling_moemb import kernels_report
from moemb.trainers import train
from moemb.trainers.cli import main
from moemb.trainers.files import held
from moemb.trainers.mini_contrastive_config import MiniContrastiveConfig
from moemb.trainers.pretrain_config import PretrainConfig
from moemb.trainers.recipe import load_recipe
from moemb.trainers.repository import assemble_checkpoint

from .test_mini_contrastive import SETTINGS
from .test_pretrain import TINY


RECIPES = Path(__file__).parents[2] / "recipes" / "moemb-mini"


def write(path, **values):
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return str(path)


def test_both_recipes_train_one_after_the_other(tmp_path, fake_corpus, monkeypatch):
    monkeypatch.setattr("moemb.trainers.corpus.load_corpus", lambda path: fake_corpus)
    pretrain = write(tmp_path / "p.yaml", method="pretrain", output_dir=tmp_path / "p", **TINY)
    contrastive = write(
        tmp_path / "c.yaml",
        method="mini-contrastive",
        output_dir=tmp_path / "c",
        init_from=tmp_path / "p/final",
        **SETTINGS,
    )
    assert main(["train", "--config", pretrain, "--max_steps", "2"]) == 0
    assert main(["train", "--config", contrastive, "--max_steps", "2"]) == 0
    assert (tmp_path / "c" / "final" / "model.safetensors").is_file()
    (line,) = (tmp_path / "c" / "commands.jsonl").read_text().splitlines()
    at_work = {f"{row.op} on {row.device}": row.source for row in kernels_report() if row.source != "torch"}
    assert json.loads(line)["kernels"] == at_work
    # the same command again, with more steps, goes on
    assert main(["train", "--config", contrastive, "--max_steps", "4"]) == 0
    assert (tmp_path / "c" / "checkpoint-4" / "complete.json").is_file()
    check_publishing(tmp_path, contrastive)


def check_publishing(tmp_path, recipe):
    target = tmp_path / "shipped"
    target.mkdir()
    (target / "README.md").write_text("a card")
    (target / "stale").write_text("")
    assert main(["train", "--config", recipe, "--publish", str(target)]) == 0
    assert (target / "README.md").read_text() == "a card" and not (target / "stale").exists()
    record = json.loads((target / "training.json").read_text())
    assert record["step"] in (2, 4) and "eval_score" in record
    assert [entry["command"].split()[-1] for entry in record["commands"]] == ["2", "4"]
    assert "eval_score" in (target / "log.jsonl").read_text()
    curve = json.loads((target / "results" / "learning-curve.json").read_text())
    assert [row["step"] for row in curve["validation"]][-1] == 4 and record["step"] == curve["best"]["step"]
    assert curve["best"]["score"] == record["eval_score"]
    repository = assemble_checkpoint(target, tmp_path / "repository")
    assert (repository / "modules.json").is_file() and (repository / "model.safetensors").is_file()


def test_no_steps_write_the_untrained_model(tmp_path, fake_corpus, monkeypatch):
    monkeypatch.setattr("moemb.trainers.corpus.load_corpus", lambda path: fake_corpus)
    runs = []
    for name in ("a", "b"):
        recipe = write(tmp_path / f"{name}.yaml", method="pretrain", output_dir=tmp_path / name, **TINY)
        assert main(["train", "--config", recipe, "--max_steps", "0"]) == 0
        final = tmp_path / name / "final"
        runs.append([(final / file).read_bytes() for file in ("model.safetensors", "tokenizer.json", "config.json")])
    assert runs[0] == runs[1]


def test_publishing_a_run_without_evaluation_is_an_error(tmp_path, capsys):
    recipe = write(
        tmp_path / "c.yaml", method="mini-contrastive", output_dir=tmp_path / "c", init_from="x", **SETTINGS
    )
    assert main(["train", "--config", recipe, "--publish", str(tmp_path / "t")]) == 1
    assert "first evaluation" in capsys.readouterr().err and not (tmp_path / "t").exists()


@pytest.mark.parametrize("method", ["", "method: magic\n"])
def test_an_unknown_method_is_named(tmp_path, method, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(method + "output_dir: x\n")
    assert main(["train", "--config", str(recipe)]) == 1
    assert "contrastive | pretrain | mini-contrastive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "config_class"), [("pretrain", PretrainConfig), ("contrastive", MiniContrastiveConfig)]
)
def test_the_recipes_of_moemb_mini_are_valid(name, config_class):
    (config,) = load_recipe(RECIPES / f"{name}.yaml", config_class, extra_keys=("method",))
    assert config.max_steps >= 1


def test_freed_memory_is_kept_without_complaint():
    train.keep_freed_memory()


def test_two_trainings_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "run"
    first, other = (
        SimpleNamespace(
            args=SimpleNamespace(output_dir=str(folder), max_steps=0),
            is_world_process_zero=lambda main=main: main,
            export_final=lambda: "written",
        )
        for main in (True, False)
    )
    args = SimpleNamespace(config="recipe.yaml", overrides=[])
    with held(folder, ValueError("held")):
        with pytest.raises(train.TrainError, match="another training writes to .*run: wait until"):
            train.run_trainer(first, args)
        assert train.run_trainer(other, args) == 0  # the other processes of the same training
    assert train.run_trainer(first, args) == 0

import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal

import pytest
from sentence_transformers import SentenceTransformerTrainingArguments

from moemb.trainers.recipe import (
    RecipeError,
    check_least,
    expand_paths,
    load_recipe,
    parse_overrides,
    read_recipe,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Inner:
    width: int = 1


@dataclasses.dataclass
class Settings:
    learning_rate: float = 1e-3
    steps: int = 10
    packing: bool = False
    name: str = "run"
    languages: list[str] | None = None
    size: tuple[int, int] = (1, 1)
    mode: Literal["fast", "exact"] = "fast"
    colour: Colour = Colour.RED
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)
    folder: Path | None = None
    anything: Any = None
    resume: str | bool | None = None
    derived: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Needed:
    corpus: str = dataclasses.field(metadata={"help": "folder of the corpus"})
    steps: int = 1

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_values_take_the_type_of_their_field(recipe):
    path = recipe(
        "learning_rate: 1e-4\nsteps: 1e3\npacking: true\nname: x\nlanguages: [en, de]\nsize: [2, 3]\n"
        "mode: exact\ncolour: blue\nweights: {text: 1}\ninner: {width: 4}\n"
        "folder: some/where\nanything: [1, {a: 2}]\nresume: true\n"
    )
    (settings,) = load_recipe(path, Settings)
    assert settings == Settings(
        1e-4, 1000, True, "x", ["en", "de"], (2, 3), "exact", Colour.BLUE, {"text": 1.0}, Inner(4), Path("some/where"),
        [1, {"a": 2}], True,
    )  # fmt: skip
    assert isinstance(settings.steps, int) and isinstance(settings.weights["text"], float)


def test_overrides_win_over_the_file_and_the_file_over_defaults(recipe):
    path = recipe("steps: 3\nname: file\n")
    flags = [
        "--steps",
        "5",
        "--learning-rate=2e-5",
        "--languages",
        "[ja]",
        "--packing",
        "--resume",
        "none",
        "--name",
        "7",
    ]
    (settings,) = load_recipe(path, Settings, overrides=flags)
    assert (settings.steps, settings.learning_rate, settings.languages) == (5, 2e-5, ["ja"])
    assert settings.packing is True and settings.resume == "none" and settings.name == "7"


def test_a_shared_key_goes_to_every_dataclass(recipe):
    settings, needed = load_recipe(recipe("steps: 7\ncorpus: here\n"), Settings, Needed)
    assert (settings.steps, needed.steps, needed.corpus) == (7, 7, "here")


def test_no_file_means_defaults():
    assert load_recipe(None, Settings) == (Settings(),)


def test_training_arguments_of_sentence_transformers(tmp_path, recipe):
    path = recipe(
        f"output_dir: {tmp_path}\neval_strategy: steps\neval_steps: 5\nlearning_rate: 1e-4\nreport_to: none\n"
    )
    (arguments,) = load_recipe(
        path, SentenceTransformerTrainingArguments, overrides=["--lr_scheduler_kwargs", "{a: 1}"]
    )
    assert arguments.learning_rate == 1e-4 and arguments.eval_strategy.value == "steps"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setps: 3", r"unknown key 'setps' in .*recipe.yaml; did you mean 'steps'\?"),
        ("derived: 3", "unknown key 'derived'"),
        ("steps: many", "'steps' in .* is 'many' .* must be a number"),
        ("steps: 1.5", "must be a whole number"),
        ("steps: .inf", "must be a whole number"),
        ("steps: true", "must be a number"),
        ("packing: 1", "'packing' in .* is 1 .int., but must be true or false"),
        ("packing: 'yes'", "must be true or false"),
        ("name: 5", "quote it"),
        ("languages: en", "must be a list"),
        ("languages: [1]", "'languages' in .*, value 0 is 1"),
        ("size: [1, 2, 3]", "a list of 2 values"),
        ("mode: exakt", "must be one of .*; did you mean 'exact'"),
        ("colour: green", "must be one of .'red', 'blue'."),
        ("weights: {text: heavy}", "key 'text' is 'heavy'"),
        ("inner: {widht: 2}", "unknown key 'widht' in 'inner' in .*; did you mean 'width'"),
        ("steps: 1\nname: x\nsteps: 2", "'steps' is given twice, on lines 1 and 3"),
        ("- a\n- b", "flat mapping"),
        ("steps: [1", "not valid YAML"),
        ("name: 2026-13-01", "recipe .*recipe.yaml' is not valid YAML: month must be in 1..12"),
        ("name: a\0b", "recipe .*recipe.yaml' is not valid YAML"),
        ("{[a]: 1}", r"recipe.yaml: the key on line 1 is \['a'\], but a key must be a name"),
        ("steps: 1\n{a: b}: 1", r"recipe.yaml: the key on line 2 is \{'a': 'b'\}, but a key must be a name"),
        ("anything: {[a]: 1}", r"recipe.yaml: the key on line 1 is \['a'\]"),
        ("", "recipe .*recipe.yaml' is empty; add 'key: value' lines"),
        ("# steps: 1\n", "recipe .*recipe.yaml' is empty"),
    ],
)
def test_a_mistake_is_named(recipe, text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe(text), Settings)


def test_missing_required_key_is_named_with_its_help(recipe):
    with pytest.raises(RecipeError, match=r"lacks corpus \(folder of the corpus\)"):
        load_recipe(recipe("steps: 1"), Needed)


def test_the_dataclass_has_the_last_word(recipe):
    with pytest.raises(RecipeError, match="steps must not be negative, got -1"):
        load_recipe(recipe("steps: -1\ncorpus: x"), Needed)


def test_unknown_override_and_stray_argument(recipe):
    with pytest.raises(RecipeError, match="unknown key 'stesp' on the command line; did you mean 'steps'"):
        load_recipe(recipe("{}"), Settings, overrides=["--stesp", "3"])
    with pytest.raises(RecipeError, match="unexpected argument 'stray'"):
        parse_overrides(["--steps=3", "stray"])


def test_extra_keys_are_left_to_the_caller(recipe):
    path = recipe("method: pretrain\nsteps: 2")
    assert load_recipe(path, Settings, extra_keys=("method",))[0].steps == 2
    assert read_recipe(path)["method"] == "pretrain"


def test_missing_file_suggests_its_neighbour(recipe):
    path = recipe("steps: 2")
    with pytest.raises(RecipeError, match=r"does not exist; did you mean '.*recipe.yaml'"):
        read_recipe(path.with_name("recipes.yaml"))


def test_negative_numbers_and_null_on_the_command_line():
    (settings,) = load_recipe(None, Settings, overrides=["--steps", "-3", "--languages", "null"])
    assert settings.steps == -3 and settings.languages is None


def test_home_folders_of_paths_are_filled_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = Settings(folder=Path("~/runs"), name="~/run")
    expand_paths(settings)
    assert settings.folder == Path("/home/somebody/runs") and settings.name == "~/run"


@pytest.mark.parametrize("value", [9, float("nan")])
def test_a_setting_below_its_bound_is_named(value):
    with pytest.raises(ValueError, match=f"steps is {value}, but must be at least 10"):
        check_least(Settings(steps=value), learning_rate=0, steps=10)


def test_settings_at_their_bound_and_absent_ones_pass():
    check_least(Settings(steps=10, resume=None), steps=10, resume=1)

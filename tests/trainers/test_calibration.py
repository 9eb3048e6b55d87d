"""`moemb calibrate` from recipe to configuration, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moemb.trainers import calibration_repository, cli
from moemb.trainers.calibration import CalibrationConfig, calibrate
from moemb.trainers.calibration_data import read_calibration_data
from moemb.trainers.calibration_passes import CalibrationError, CalibrationInputs, measure_blocks, measure_budget
from moemb.trainers.calibration_repository import CONFIG_KEY, RECORD_NAME, locate_model, own_folder, write_budget
from moemb.trainers.calibration_thresholds import ThresholdSearch, ThresholdSettings
from moemb.trainers.quickstart_model import load_model
from moemb.trainers.recipe import load_recipe
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, calibration_items, pruning_model, write_repository
from .stock_checkpoint import save_stock_checkpoint, stock_config


RECIPES = Path(__file__).parents[2] / "recipes" / "moemb-mini"
IDENTITY = {"model": "m" * 64, "data": "d" * 64}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sixteen items: texts, pictures, pictures with a text."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lines = []
    for number in range(16):
        row = {"text": f"item number {number} " * (1 + number % 4), "side": ("query", "document")[number % 2]}
        if number % 3 == 0:
            Image.fromarray(rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)).save(folder / f"{number}.png")
            row["image"] = f"{number}.png"
        lines.append(json.dumps(row))
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "items.jsonl"


@pytest.fixture
def repository(tmp_path, tiny_settings) -> Path:
    return write_repository(tmp_path / "model", tiny_settings)


@pytest.fixture
def recipe(repository, data, tmp_path) -> Path:
    path = tmp_path / "calibrate.yaml"
    path.write_text(
        f"model: {repository}\ncalibration_data: {{ {data}: 16 }}\nwork: {tmp_path / 'work'}\nbatch_size: 5\n",
        encoding="utf-8",
    )
    return path


def settings_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def executed_skip_rate(model, items) -> float:
    """The rate as the model counts what it ran, item by item with its own default budget."""
    first, pairs, rows = model[0], 0, 0
    for item in items:
        features = first.processor([item.value])
        with torch.no_grad():
            record = first.model(**features, pooled_only=True, output_compute=True).compute
        length = len(features["input_ids"][0])
        rows += length * (BLOCKS - 1) + 1
        pairs += int(record.expert_pairs.sum())
    return 1 - pairs / (rows * first.model.config.text_config.num_experts_per_tok)


def test_the_verb_writes_a_budget_that_the_model_follows(recipe, repository, data, tmp_path, capsys):
    before = settings_of(repository)
    assert cli.main(["calibrate", "--config", str(recipe), "--skip_rate", "0.4", "--keep_previous", "true"]) == 0
    printed = capsys.readouterr().out
    after = settings_of(repository)
    budget, note = after.pop("adaptive_compute"), after.pop(CONFIG_KEY)
    assert before.pop("adaptive_compute") is None and after == before, "only the budget may change"
    assert json.loads((repository / "config.json.previous").read_text()) == before | {"adaptive_compute": None}
    assert set(budget) == {"modes"} and len(budget["modes"]["layer_scales"]) == BLOCKS
    assert sum(budget["modes"]["layer_scales"]) == pytest.approx(1)
    items = read_calibration_data({str(data): 16})
    record = json.loads((repository / RECORD_NAME).read_text())
    assert record["adaptive_compute"] == budget and record["calibration_items"] == note["calibration_items"]
    assert len(note["calibration_items"]) == len(note["model_weights"]) == 64 and note["items"] == 16
    assert f"{record['skip_rate']:.2%} of the pairs skipped" in printed and str(repository) in printed
    model, _ = load_model(str(repository))
    assert model[0].model.config.adaptive_compute == budget
    rate = executed_skip_rate(model, items)
    assert rate == pytest.approx(record["skip_rate"], abs=1e-12) and abs(rate - 0.4) <= 0.005
    values = [item.value for item in items]
    default = model.encode(values, convert_to_tensor=True)
    full = model.encode(values, convert_to_tensor=True, adaptive_compute={})
    assert torch.equal(default, model.encode(values, convert_to_tensor=True, adaptive_compute=budget))
    moved = 1 - (default.double() * full.double()).sum(1).mean()
    assert float(moved) == pytest.approx(record["distance"], rel=1e-2) and record["distance"] > 1e-6


def test_a_second_run_measures_nothing_and_keeps_every_previous_configuration(recipe, repository, monkeypatch):
    flags = ["calibrate", "--config", str(recipe), "--keep_previous=true"]
    assert cli.main(flags) == 0
    first = settings_of(repository)
    monkeypatch.setattr(CalibrationInputs, "features", lambda *_: pytest.fail("it was measured again"))
    assert cli.main(flags) == 0
    assert settings_of(repository) == first
    names = sorted(path.name for path in repository.glob("config.json*"))
    assert names == ["config.json", "config.json.previous", "config.json.previous-2"]
    assert json.loads((repository / "config.json.previous-2").read_text()) == first


def test_two_thresholds_go_into_a_copy(recipe, repository, tmp_path):
    target, untouched = tmp_path / "copy", (repository / "config.json").read_bytes()
    (config,) = load_recipe(
        recipe, CalibrationConfig, overrides=["--thresholds", "two", "--grid", "5", "--output", str(target)]
    )
    record, written = calibrate(config)
    assert written[1] == target and (repository / "config.json").read_bytes() == untouched
    assert not (repository / RECORD_NAME).exists() and not list(tmp_path.glob(".copy*"))
    names = {p.relative_to(repository).as_posix() for p in repository.rglob("*") if p.is_file()}
    copied = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert copied == names | {RECORD_NAME}
    modes = settings_of(target)["adaptive_compute"]["modes"]
    assert set(modes["tau"]) == set(modes["layer_scales"]) == {"text", "image", "video"}
    assert modes["tau"]["image"] == modes["tau"]["video"]
    assert abs(record["skip_rate"] - 0.5) <= 0.005
    chosen = [cell for cell in record["frontier"] if cell["chosen"]]
    assert len(chosen) == 1 and chosen[0]["distance"] == min(cell["distance"] for cell in record["frontier"])
    assert 2 <= len(record["frontier"]) <= 5
    model, _ = load_model(str(target))
    assert model[0].model.config.adaptive_compute["modes"] == modes


def inputs_of(tiny_settings, folder, count=12) -> CalibrationInputs:
    processor = lean_processor()
    model = pruning_model(tiny_settings, processor)
    return CalibrationInputs(model, processor, calibration_items(count), IDENTITY, folder, progress=False)


@pytest.mark.parametrize("target", [0.1, 0.775])
@pytest.mark.parametrize(
    "changes",
    [{}, {"two": True, "grid": 3}, {"base": {"token_pruning": {"layer": 4, "keep": 0.5}, "top_k": 2}},
     {"modes": {"min_experts": 0, "min_experts_emb": 2, "renormalise": True}}],
    ids=["one", "two", "with pruning", "renormalised"],
)  # fmt: skip
def test_the_rate_is_met_in_few_passes(tiny_settings, tmp_path, target, changes):
    inputs = inputs_of(tiny_settings, tmp_path)
    settings = ThresholdSettings(skip_rate=target, **changes)
    blocks = measure_blocks(inputs, settings.two)
    found = ThresholdSearch(inputs, blocks, settings).run()
    again = measure_budget(inputs, found.budget, blocks.vectors)
    assert again.rate == found.rate and abs(found.rate - target) <= 0.005
    assert found.passes <= (6 if not settings.two else 9)
    assert found.budget.items() >= settings.base.items()


def test_the_frontier_holds_what_just_skips_enough(tiny_settings, tmp_path):
    """By the weights of the full pass, against looking at the whole grid; each step measured on some items."""
    inputs = inputs_of(tiny_settings, tmp_path)
    settings = ThresholdSettings(skip_rate=0.5, two=True, grid=4, frontier_items=5)
    search = ThresholdSearch(inputs, measure_blocks(inputs, True), settings)
    direction, frontier = search._frontier()
    grids = [search._axis(search.measured.histogram, place) for place in range(2)]
    assert all(len(grid) == 4 and grid == sorted(grid) and grid[0] == 0 for grid in grids)
    corners = {
        (text, min(v for v in grids[1] if search._rate(search.measured.histogram, [text, v]) >= 0.5))
        for text in grids[0]
        if search._rate(search.measured.histogram, [text, grids[1][-1]]) >= 0.5
    }
    assert {(cell["tau_text"], cell["tau_visual"]) for cell in frontier} == corners
    for cell in frontier:
        budget = settings.budget(search.scales, (cell["tau_text"], cell["tau_visual"]))
        alone = measure_budget(inputs, budget, search.measured.vectors, most=5)
        assert (alone.rate, alone.distance) == (cell["rate"], cell["distance"])
    best = min(frontier, key=lambda cell: cell["distance"])
    assert best["chosen"] and direction == [best["tau_text"], best["tau_visual"]]


def test_rates_that_cannot_be_reached_are_refused(tiny_settings, tmp_path):
    inputs = inputs_of(tiny_settings, tmp_path)
    blocks = measure_blocks(inputs, False)
    protected = ThresholdSettings(skip_rate=0.6, modes={"min_experts": 1})
    with pytest.raises(CalibrationError, match=r"skip_rate is 0.6, but at most 0.5000 .* 1 of a token's experts"):
        ThresholdSearch(inputs, blocks, protected)
    coarse = ThresholdSettings(skip_rate=1 / math.pi, tolerance=1e-9)
    with pytest.raises(CalibrationError, match=r"no threshold skips 0.3183 .* the nearest of \d+ skips 0\.\d+"):
        ThresholdSearch(inputs, blocks, coarse).run()


def test_two_thresholds_need_two_kinds_of_tokens(tiny_settings, tmp_path):
    inputs = inputs_of(tiny_settings, tmp_path, count=1)
    with pytest.raises(CalibrationError, match="no images and no video"):
        ThresholdSearch(inputs, measure_blocks(inputs, True), ThresholdSettings(two=True))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skip_rate", "1"], "skip_rate is 1.0, but must be above 0 and below 1"),
        (["--tolerance", "0"], "tolerance is 0.0, but must be above 0"),
        (["--grid", "1"], "grid is 1, but must be at least 2"),
        (["--thresholds", "tow"], "must be one of ['one', 'two']; did you mean 'two'"),
        (["--adaptive_compute", "{modes: {tau: 1}}"], "adaptive_compute has 'modes', which is what is calibrated"),
        (["--adaptive_compute", "{top_k: 9}"], "`adaptive_compute['top_k']` must be an integer from 1 to 2"),
        (["--min_experts", "3"], "['min_experts']` must be an integer from 0 to 2"),
        (["--thresholds", "two", "--min_experts_emb", "-1"], "['min_experts_emb']` must be an integer from 0 to 2"),
        (["--calibration_data", "{}"], "calibration_data is empty"),
        (["--skip_rat", "0.3"], "unknown key 'skip_rat' on the command line; did you mean 'skip_rate'"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(recipe, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(CalibrationInputs, "features", lambda *_: pytest.fail("it was measured"))
    assert cli.main(["calibrate", "--config", str(recipe), *flags]) == 1
    assert message in capsys.readouterr().err


def test_models_and_outputs_that_do_not_do(recipe, repository, tmp_path, tiny_settings, capsys):
    save_stock_checkpoint(tmp_path / "stock", stock_config(tiny_settings), packed=False)
    (tmp_path / "empty").mkdir()
    cases = [
        (["--model", str(tmp_path / "stock")], "make a MoEMB repository of it with 'moemb convert"),
        (["--model", str(tmp_path / "empty")], "has no config.json"),
        (["--model", "nowhere"], "model nowhere is neither a folder nor a Hub id"),
        (["--output", str(tmp_path / "stock")], "exists already; remove it or choose another output"),
        (["--report", str(tmp_path / "stock")], "is a folder; give the name of a file"),
    ]
    for flags, message in cases:
        assert cli.main(["calibrate", "--config", str(recipe), *flags]) == 1
        assert message in capsys.readouterr().err


def test_a_model_that_is_not_yours_stays_as_it_is(recipe, repository, monkeypatch, tmp_path):
    """moemb-mini lies in a cache that everything else reads."""
    monkeypatch.setattr(calibration_repository, "mini_repository", lambda: repository)
    assert locate_model("moemb-mini") == repository and own_folder("moemb-mini") is None
    assert own_folder(str(repository)) == repository.resolve() and own_folder("org/model") is None
    monkeypatch.setattr("moemb.trainers.calibration.load_model", lambda name, device: load_model(str(repository)))
    before = settings_of(repository)
    assert cli.main(["calibrate", "--config", str(recipe), "--model", "moemb-mini"]) == 0
    assert settings_of(repository) == before and not (repository / RECORD_NAME).exists()


def test_a_write_that_fails_leaves_nothing(repository, tmp_path, monkeypatch):
    record = dict.fromkeys(calibration_repository._IN_CONFIG, 0)
    before = (repository / "config.json").read_bytes()

    def fail(path, text):
        if path.name == "config.json":
            raise OSError("disk full")
        path.write_text(text)

    monkeypatch.setattr(calibration_repository, "write_atomically", fail)
    for target in (tmp_path / "copy", repository):
        with pytest.raises(OSError, match="disk full"):
            write_budget(repository, target, {"top_k": 1}, record)
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob(".copy*"))
    assert (repository / "config.json").read_bytes() == before


def test_the_recipe_of_moemb_mini_is_valid():
    (config,) = load_recipe(RECIPES / "calibrate.yaml", CalibrationConfig)
    assert config.model == "moemb-mini" and config.output.name == "moemb-mini-calibrated"

"""`moemb analyze` from recipe to pictures, its maps over images, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_moemb.patches_moemb import patchify
from moemb.trainers import cli
from moemb.trainers.analyze import FIGURES, AnalyzeConfig
from moemb.trainers.analyze_heatmaps import heat_map, items_with_pictures, map_rows, unpatched
from moemb.trainers.calibration_data import CalibrationItem
from moemb.trainers.calibration_passes import CalibrationInputs
from moemb.trainers.recipe import load_recipe
from tests.processors import lean_processor

from .pruning_repository import calibration_items, pruning_model, write_repository


RECIPES = Path(__file__).parents[2] / "recipes" / "moemb-mini"


def sweep_report() -> dict:
    """A report of `moemb prune-experts --sweep`, as far as it is read."""

    def point(saliency, experts, value):
        change = {"R@10": {"value": value - 0.5, "interval": [value - 0.52, value - 0.48]}}
        return {"saliency": saliency, "experts": experts, "mean": {"R@10": value}, "change": change}

    names = ("reap", "man", "msan", "frequency", "probability", "random")
    points = [point(n, e, 0.5 - 0.01 * i - 0.02 * (8 - e)) for i, n in enumerate(names) for e in (6, 4, 2)]
    return {"points": [point("", 8, 0.5), *points]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_settings) -> Path:
    """A recipe over a tiny model with a budget of its own, and eight items."""
    folder = tmp_path_factory.mktemp("analyze")
    rng = np.random.default_rng(0)
    lines = [{"text": f"item {number}"} for number in range(4)]
    for number in range(4):
        Image.fromarray(rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "text": "a picture"})
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    write_repository(folder / "model", tiny_settings, adaptive_compute={"top_k": 1})
    (folder / "sweep.json").write_text(json.dumps(sweep_report()), encoding="utf-8")
    path = folder / "analyze.yaml"
    path.write_text(
        f"model: {folder / 'model'}\ncalibration_data: {{ {folder / 'items.jsonl'}: 8 }}\n"
        f"output: {folder / 'figures'}\nwork: {folder / 'work'}\nbatch_size: 4\nmaps: 2\n"
        f"sweep_report: {folder / 'sweep.json'}\n"
        "budgets: { half: { token_pruning: { layer: 4, keep: 0.5 } } }\n",
        encoding="utf-8",
    )
    return path


def test_every_figure_and_its_table_are_written(recipe, monkeypatch):
    assert cli.main(["analyze", "--config", str(recipe)]) == 0
    folder = recipe.parent / "figures"
    written = sorted(path.name for path in folder.iterdir())
    assert written == sorted(["analysis.json", *(f"{name}.{kind}" for name in FIGURES for kind in ("csv", "png"))])
    for name in FIGURES:
        picture = np.asarray(Image.open(folder / f"{name}.png").convert("RGB"))
        assert picture.shape[0] > 250 and picture.shape[1] > 400
        assert 0.02 < (picture < 250).any(axis=-1).mean() < 0.98, f"{name} is blank"
    rows = {name: list(csv.DictReader((folder / f"{name}.csv").open())) for name in FIGURES}
    assert {row["budget"] for row in rows["firing"]} == {"configured", "half"}
    assert {row["skipped"] for row in rows["firing"] if row["budget"] == "configured"} == {"0.5", ""}
    assert {row["saliency"] for row in rows["saliency"]} == {
        "reap",
        "man",
        "msan",
        "frequency",
        "probability",
        "random",
    }
    about = json.loads((folder / "analysis.json").read_text())
    assert about["items"] == 8 and len(about["calibration_items"]) == len(about["model_weights"]) == 64
    before = {path.name: path.read_bytes() for path in folder.glob("*.csv")}
    monkeypatch.setattr(CalibrationInputs, "features", lambda *_: pytest.fail("it was measured again"))
    figures = "[firing, beta, agreement, focus, load, saliency]"
    assert cli.main(["analyze", "--config", str(recipe), "--figures", figures]) == 0
    assert {path.name: path.read_bytes() for path in folder.glob("*.csv")} == before


def test_a_sweep_is_run_when_there_is_no_report(recipe, tmp_path, monkeypatch):
    from moemb.trainers import analyze
    from moemb.trainers.prune_experts import ExpertPruning

    def sweep(self, statistics, command=""):
        assert statistics == "measured" and self.config.sweep == [4, 2]
        assert self.config.sweep_saliencies == ["reap", "man", "msan", "frequency", "probability", "random"]
        self.config.report.write_text(json.dumps(sweep_report()), encoding="utf-8")
        return self.config.report, None

    monkeypatch.setattr(ExpertPruning, "sweep", sweep)
    monkeypatch.setattr(ExpertPruning, "statistics", lambda self: "measured")
    monkeypatch.setattr("moemb.trainers.prune_experts.sweep_tasks", lambda *_: [])
    flags = ["--figures", "[saliency]", "--sweep", "[4, 2]", "--output", str(tmp_path / "out")]
    (config,) = load_recipe(recipe, AnalyzeConfig, overrides=[*flags, "--sweep_report", "null"])
    written = analyze.Analyzer(config).run()
    assert [path.name for path in written] == ["saliency.csv", "saliency.png", "analysis.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--figures", "[betta]"], "there is no figure 'betta'; did you mean 'beta'"),
        (["--sweep_report", "null", "--figures", "[saliency]"], "needs sweep_report (of moemb prune-experts --sweep)"),
        (["--layer", "0"], "layer is 0, but must be at least 1"),
        (["--layer", "9"], "layer is 9, but must be from 1 to 8"),
        (["--maps", "0"], "maps is 0, but must be at least 1"),
        (
            ["--budgets", "{big: {top_k: 9}}"],
            "the budget 'big': `adaptive_compute['top_k']` must be an integer from 1",
        ),
        (["--sweep_report", "nowhere.json"], "sweep_report nowhere.json is no report of 'moemb prune-experts"),
        (["--calibration_data", "{}"], "calibration_data is empty"),
        (["--model", "nowhere"], "model nowhere is neither a folder nor a Hub id"),
        (["--budget", "{}"], "unknown key 'budget' on the command line; did you mean 'budgets'"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(recipe, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(CalibrationInputs, "features", lambda *_: pytest.fail("it was measured"))
    assert cli.main(["analyze", "--config", str(recipe), *flags]) == 1
    assert message in capsys.readouterr().err


def test_the_recipe_of_moemb_mini_is_valid():
    (config,) = load_recipe(RECIPES / "analyze.yaml", AnalyzeConfig)
    assert config.figures == [name for name in FIGURES if name != "saliency"] and len(config.budgets) == 3


@pytest.mark.parametrize("shape", [(32, 64), (3, 48, 32), (4, 32, 32)])
def test_patches_become_the_pixels_they_were_cut_from(shape):
    stock = lean_processor().video_processor
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    patches = patchify(pixels[None], 8, 2, 2, stock.image_mean, stock.image_std)[0]
    steps = 1 if len(shape) == 2 else -(-shape[0] // 2)
    found = unpatched(patches, (steps, shape[-2] // 8, shape[-1] // 8), stock)
    wanted = pixels[None] if len(shape) == 2 else pixels[::2]
    np.testing.assert_allclose(found, wanted / 255, atol=1e-6)


def bright_corner(frames: int | None) -> np.ndarray:
    """Black, but for the lower left 16 x 16 pixels."""
    pixels = np.zeros((*((frames,) if frames else ()), 64, 32, 3), np.uint8)
    pixels[..., 48:, :16, :] = 255
    return pixels


@pytest.mark.parametrize(("kind", "value"), [("image", bright_corner(None)), ("video", bright_corner(4))])
def test_a_map_lies_over_its_picture(tiny_settings, tmp_path, kind, value):
    """The token of the bright corner differs from all others, and what is kept is what the model keeps."""
    processor = lean_processor()
    model = pruning_model(tiny_settings, processor)
    items = [CalibrationItem({kind: value, "text": "a corner"}, "document", "x")]
    inputs = CalibrationInputs(model, processor, items, {}, tmp_path, progress=False)
    found = heat_map(inputs, 0, layer=4)
    steps = 1 if kind == "image" else 2
    assert found.kind == kind and found.frames.shape[0] == steps and found.kept.shape[0] == steps
    frames, rows, columns = found.kept.shape
    height, width = found.frames.shape[1:3]
    assert (height, width) == (rows * 16, columns * 16)
    for frame in range(frames):
        means = found.frames[frame].reshape(rows, 16, columns, 16, 3).mean(axis=(1, 3, 4))
        assert np.unravel_index(means.argmax(), means.shape) == (rows - 1, 0)
    features = inputs.features(items)
    with torch.no_grad():
        budget = {"token_pruning": {"layer": 4, "keep": 0.5}}
        output = model(**features, adaptive_compute=budget, output_compute=True)
    tokens = features["mm_token_type_ids"][0] == (1 if kind == "image" else 2)
    assert output.keep_mask[0][tokens].tolist() == found.kept.flatten().tolist()
    table = map_rows([found])
    assert len(table) == found.kept.size and sum(row["kept"] for row in table) == -(-found.kept.size // 2)
    assert [row["beta"] for row in table] == found.scores["beta"].flatten().tolist()


def test_items_with_pictures_are_spread_and_hold_clips(tiny_settings, tmp_path):
    items = calibration_items(16)
    chosen = items_with_pictures(items, 6)
    kinds = ["video" if "video" in items[index].value else "image" for index in chosen]
    assert kinds == ["image"] * 4 + ["video"] * 2 and len(set(chosen)) == 6
    assert items_with_pictures(items[:1], 3) == []
    assert len(items_with_pictures([items[2]], 3)) == 1
    text = CalibrationInputs(pruning_model(tiny_settings, lean_processor()), lean_processor(), items, {}, tmp_path)
    assert heat_map(text, 0, layer=4) is None

"""Where a calibrated budget goes: into `config.json` of a model repository, whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .calibration_passes import CalibrationError
from .convert import locate_source
from .convert_safetensors import ConversionError, read_json_mapping
from .files import write_atomically
from .prune_experts_repository import check_target
from .quickstart_model import MINI, mini_repository


RECORD_NAME = "calibration.json"
# What config.json says of the calibration, beside `adaptive_compute`, which holds settings alone.
CONFIG_KEY = "adaptive_compute_calibration"
_IN_CONFIG = ("calibration_items", "items", "model_weights", "skip_rate", "distance")


def locate_model(model: str) -> Path:
    """
    The folder of a model.

    Args:
        model (`str`): `"moemb-mini"`, a folder of a MoEMB repository, or a Hub id of one.

    Raises:
        CalibrationError: there is none, or it is not MoEMB's.
    """
    try:
        folder = mini_repository() if model == MINI else locate_source(model)
        settings = read_json_mapping(folder / "config.json")
    except ConversionError as error:
        raise CalibrationError(str(error).replace("--from", "model")) from error
    except FileNotFoundError:
        raise CalibrationError(f"model {model} has no config.json; is it a model repository?") from None
    if settings.get("model_type") != "moemb":
        raise CalibrationError(
            f"model {model} has model_type {settings.get('model_type')!r}; make a MoEMB repository of it with "
            f"'moemb convert --from {model} --to DIR'"
        )
    return folder


def own_folder(model: str) -> Path | None:
    """The folder that may be changed in place: a model that was named by its folder; never a cache."""
    folder = Path(model).expanduser()
    return folder.resolve() if model != MINI and folder.is_dir() else None


def check_output(model: str, output: Path | None) -> None:
    """Raises `PruningError` when something else than the model is at the output; called before measuring."""
    if output is not None and output.resolve() != own_folder(model):
        check_target(output)


def write_budget(
    source: Path, target: Path, budget: Mapping[str, Any], record: Mapping[str, Any], keep_previous: bool = False
) -> Path:
    """
    Writes a budget into a repository: `adaptive_compute` in `config.json`, with the hashes of model and data beside
    it, and all that is known of the calibration into `calibration.json`.

    Args:
        source (`Path`): folder of the model.
        target (`Path`): the same, or the folder of a copy that is made first.
        budget (`Mapping`): validated settings.
        record (`Mapping`): how it came about.
        keep_previous (`bool`, *optional*, defaults to `False`): keep the configuration that is replaced, as
            `config.json.previous` (`.previous-2` and so on when that is taken).

    Returns:
        `Path`: the target.
    """
    target = target.expanduser().absolute()
    if target.resolve() == source.resolve():
        _write_settings(target, budget, record, keep_previous)
        return target
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        _write_settings(partial, budget, record, keep_previous)
        if target.is_dir():
            target.rmdir()  # `check_target` lets an empty folder pass
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_settings(folder: Path, budget: Mapping[str, Any], record: Mapping[str, Any], keep_previous: bool) -> None:
    path = folder / "config.json"
    settings = read_json_mapping(path)
    if keep_previous:
        names = ["config.json.previous", *(f"config.json.previous-{number}" for number in range(2, 1000))]
        write_atomically(next(folder / n for n in names if not (folder / n).exists()), path.read_text("utf-8"))
    # the record first: a configuration that names a calibration must find it
    write_atomically(folder / RECORD_NAME, json.dumps(dict(record), indent=2, ensure_ascii=False) + "\n")
    settings["adaptive_compute"] = dict(budget)
    settings[CONFIG_KEY] = {name: record[name] for name in _IN_CONFIG}
    write_atomically(path, json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


__all__ = ["CONFIG_KEY", "RECORD_NAME", "check_output", "locate_model", "own_folder", "write_budget"]

"""The folders a training run leaves: shippable checkpoints, and the record of how they came about."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modeling_moemb import kernels_report

from .errors import MoEMBError
from .files import put_in_place


COMMANDS = "commands.jsonl"
LOG = "log.jsonl"
RECORD = "training.json"
_PACKAGES = ("moemb", "torch", "transformers", "tokenizers", "numpy")


class CheckpointError(MoEMBError, FileNotFoundError):
    """A run has no checkpoint to publish; the text names the folder and the remedy."""


def write_checkpoint(folder: Path, model, tokenizer, record: dict[str, Any]) -> None:
    """Writes a shippable checkpoint into a new folder: weights, config, processor files and `training.json`.

    Args:
        folder (`Path`): The folder; replaced as a whole, so that it is never seen half written.
        model (`MoEMBModel`): The model, in the dtype its weights are to have.
        tokenizer (`PreTrainedTokenizerFast`): moemb-mini's tokenizer.
        record (`dict`): Goes into `training.json`; must be JSON.
    """
    draft = _draft(folder)
    model.save_pretrained(draft)
    _finish(draft, folder, tokenizer, record)


def publish(run: str | Path, target: str | Path, name: str = "best") -> Path:
    """Copies a run's checkpoint, with its log and the commands that made it, to where it is shipped from.

    Works on a run that is going on, was stopped, or is complete.

    Args:
        run (`str` or `Path`): The run's `output_dir`.
        target (`str` or `Path`): The folder to write, such as `recipes/moemb-mini/checkpoint`; replaced as a whole,
            except for a `README.md` in it, which is kept.
        name (`str`, *optional*, defaults to `"best"`): `"best"` or `"final"`.

    Returns:
        `Path`: the target, with `model.safetensors`, `config.json`, the processor's files, `training.json` (step,
        validation scores, commands, package versions) and `log.jsonl`.

    Raises:
        CheckpointError: if the run has no such checkpoint.
    """
    from .tokenizer import load_tokenizer

    run, target = Path(run), Path(target)
    source = run / name
    if not (source / "model.safetensors").is_file():
        raise CheckpointError(f"{run} has no {name}/model.safetensors: train until the first evaluation (eval_steps)")
    draft = _draft(target)
    for file in ("model.safetensors", "config.json"):
        shutil.copy(source / file, draft / file)
    record = json.loads((source / RECORD).read_text())
    commands = run / COMMANDS
    if commands.is_file():
        record["commands"] = [json.loads(line) for line in commands.read_text().splitlines()]
    if (run / LOG).is_file():
        shutil.copy(run / LOG, draft / LOG)
    card = target / "README.md"
    if card.is_file():
        shutil.copy(card, draft / card.name)
    _finish(draft, target, load_tokenizer(source), record)
    return target


def record_command(run: str | Path, words: Sequence[str]) -> None:
    """Appends a command line, the time, the package versions and the kernels at work to the run's `commands.jsonl`.

    Args:
        run (`str` or `Path`): The run's `output_dir`.
        words (`Sequence[str]`): The command line.
    """
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "command": shlex.join(words).replace(str(Path.home()), "~"),
        "versions": {package: version(package) for package in _PACKAGES},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "kernels": {f"{row.op} on {row.device}": row.source for row in kernels_report() if row.source != "torch"},
    }
    folder = Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / COMMANDS).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _draft(folder: Path) -> Path:
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def _finish(draft: Path, folder: Path, tokenizer, record: dict[str, Any]) -> None:
    from .repository import mini_processor

    mini_processor(tokenizer).save_pretrained(draft)
    # a record travels: no folder of the machine it was made on belongs in it
    (draft / RECORD).write_text(json.dumps(record, indent=2).replace(str(Path.home()), "~") + "\n")
    put_in_place(draft, folder)

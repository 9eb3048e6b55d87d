"""A model repository with trained gates: the repository it came from, one more weight file, and the settings.

With a frozen backbone nothing but the gates has changed, so the weights are linked (or copied where that is not
possible) instead of written again: for a model of 70 GB that is the difference between a second and half an hour.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from .calibration_repository import CONFIG_KEY
from .errors import MoEMBError
from .files import put_in_place


GATES_FILE = "model-gates.safetensors"
RECORD = "gates.json"
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class GateRepositoryError(MoEMBError, ValueError):
    """A repository that gates cannot be put into; the text names the folder and the remedy."""


def write_with_gates(source: Path, target: Path, model: Any, record: dict[str, Any]) -> Path:
    """
    Writes a repository that is `source` with the gates and the compute budget of `model`.

    Args:
        source (`Path`): folder of the repository that the backbone was loaded from.
        target (`Path`): folder to make; replaced as a whole, so that it is never seen half written.
        model (`MoEMBModel`): its `gates` and `config` are written; its backbone must be that of `source`.
        record (`dict`): how the gates came about; goes into `gates.json`.

    Raises:
        GateRepositoryError: `source` has no safetensors, or is `target` itself.
    """
    source, target = Path(source).resolve(), Path(target).absolute()
    if source == target.resolve():
        raise GateRepositoryError(f"{target} is where the gates were trained from: write to another folder")
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if path.is_dir():
            (draft / relative).mkdir(exist_ok=True)
        elif path.suffix == ".safetensors" and path.name != GATES_FILE:
            _link(path, draft / relative)
        else:
            shutil.copy(path, draft / relative)
    index = _index_of(draft)
    gates = {f"gates.{name}": tensor.detach().cpu().float() for name, tensor in model.gates.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in gates.items()}, draft / GATES_FILE, {"format": "pt"})
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith("gates.")}
    index["weight_map"] |= dict.fromkeys(gates, GATES_FILE)
    (draft / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    settings = json.loads((source / "config.json").read_text())
    settings.pop(CONFIG_KEY, None)  # of another budget
    settings |= {"gates": model.config.gates, "adaptive_compute": model.config.adaptive_compute}
    (draft / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    (draft / RECORD).write_text(json.dumps(record, indent=2).replace(str(Path.home()), "~") + "\n")
    if (draft / "modules.json").is_file():  # code of the source may be older than gates
        from modeling_moemb.sentence_transformer_moemb import complete_saved_code

        complete_saved_code(draft)
    put_in_place(draft, target)
    return target


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another file system
        shutil.copy(path, target)


def _index_of(folder: Path) -> dict[str, Any]:
    """The index of the weight files; a single file gets the name of a shard, so that the index is looked at."""
    if (folder / _INDEX).is_file():
        return json.loads((folder / _INDEX).read_text())
    if not (folder / _WHOLE).is_file():
        raise GateRepositoryError(f"{folder} has neither {_INDEX} nor {_WHOLE}: is it a model repository?")
    shard = "model-00001-of-00001.safetensors"
    (folder / _WHOLE).rename(folder / shard)
    with safe_open(folder / shard, framework="pt") as file:
        names = list(file.keys())
    return {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}

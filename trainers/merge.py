"""`moemb merge`: an adapter becomes part of the weights it was trained on, as a model repository."""

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import MoEMBError


HELP = "merge a LoRA adapter into the weights it was trained on, as a model repository"
SETTINGS, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "training.json"


class MergeError(MoEMBError, ValueError):
    """An adapter that cannot be merged. The message names the folder and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moemb merge`."""
    parser.add_argument(
        "--adapter", type=Path, required=True, metavar="DIR", help="adapter of `moemb train`, wherever it was moved to"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        help="repository it was trained on, 'moemb-mini' or Hub id (default: as the adapter names it)",
    )


def run(args: argparse.Namespace) -> int:
    """Merge as the flags say and print where the repository is."""
    adapter, target = args.adapter.expanduser(), args.to.expanduser().absolute()
    record = read_record(adapter)
    if target.exists():
        raise MergeError(f"--to {target} exists already; remove it or choose another folder")
    from .calibration_repository import locate_model
    from .quickstart_model import MINI

    name = args.model or record["base_model"]
    if args.model is None and name != MINI and "/" not in name:
        raise MergeError(f"{adapter} was trained on the folder '{name}'; say with --model where that is")
    base = locate_model(name)
    from .contrastive_checkpoint import merge_adapter

    print(
        f"{merge_adapter(base, adapter, target)}: {record['base_model']} with {adapter.name} merged into its weights"
    )
    return 0


def read_record(adapter: Path) -> dict[str, Any]:
    """
    What the training of an adapter recorded beside it.

    Args:
        adapter (`Path`): a folder with `adapter_config.json`, `adapter_model.safetensors` and `training.json`.

    Raises:
        MergeError: a file is missing, or the record is none.
    """
    for name in (SETTINGS, WEIGHTS):
        if not (adapter / name).is_file():
            raise MergeError(f"--adapter {adapter} has no {name}; name the folder 'adapter' of a run of moemb train")
    try:
        record = json.loads((adapter / RECORD).read_text(encoding="utf-8"))
        return {"base_model": record["base_model"], "base_weights": record["base_weights"]}
    except FileNotFoundError:
        raise MergeError(
            f"--adapter {adapter} has no {RECORD}, which says what weights it belongs to; an adapter that was made by "
            "other means merges with peft: PeftModel.from_pretrained(model, folder).merge_and_unload()"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise MergeError(
            f"{adapter / RECORD} is no record of a training: {error!r}; copy the adapter again"
        ) from error

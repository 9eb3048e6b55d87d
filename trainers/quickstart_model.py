"""Where moemb-mini comes from: the trained checkpoint of this repository, assembled into a model repo in the cache.

The assembled folder carries the hash of what it was made from in its name, so it is made once, and again only when the
checkpoint or the model code changed.
"""

import hashlib
from pathlib import Path
from typing import Any

from filelock import FileLock

from .corpus_sources import cache_folder
from .errors import MoEMBError
from .evaluation_encoding import folder_fingerprint


MINI = "moemb-mini"
TRAIN_COMMAND = "moemb train --config recipes/moemb-mini/contrastive.yaml"


class ModelError(MoEMBError, ValueError):
    """A model that cannot be loaded. The message names it and the reason."""


class CheckpointMissingError(MoEMBError, FileNotFoundError):
    """There is no trained checkpoint to assemble. The message names the folder and the command that makes it."""


def recipe_folder() -> Path:
    """Returns the folder of moemb-mini's recipes: beside this checkout's code, else under the working directory."""
    beside = Path(__file__).resolve().parents[1] / "recipes" / MINI
    return beside if beside.is_dir() else Path("recipes") / MINI


def mini_repository(checkpoint: Path | None = None) -> Path:
    """
    Assembles moemb-mini into a loadable model repo, unless it stands there already.

    Args:
        checkpoint (`Path`, *optional*):
            Folder of the checkpoint; `None` means the one beside the recipes.

    Returns:
        `Path`: the folder to give to `SentenceTransformer` or `AutoModel`.

    Raises:
        CheckpointMissingError: the checkpoint is not there.
    """
    from .repository import assemble_checkpoint

    folder = checkpoint or recipe_folder() / "checkpoint"
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise CheckpointMissingError(
            f"the trained checkpoint of {MINI} is not in {folder} (config.json and *.safetensors); "
            f"run from a checkout of the repository, or make it with: {TRAIN_COMMAND}"
        )
    target = cache_folder() / f"{MINI}-{_source_hash(folder)[:16]}"
    if not (target / "modules.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not (target / "modules.json").is_file():  # another process may have made it meanwhile
                assemble_checkpoint(folder, target)
    return target


def _source_hash(checkpoint: Path) -> str:
    import modeling_moemb

    from . import repository

    digest = hashlib.sha256(folder_fingerprint(checkpoint).encode())
    sources = sorted(Path(modeling_moemb.__file__).parent.glob("*.py"))
    for path in [*sources, Path(repository.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load_model(name: str, device: str | None = None) -> tuple[Any, str]:
    """
    Loads a model as users do.

    Args:
        name (`str`):
            `"moemb-mini"`, a folder, or a Hub id.
        device (`str`, *optional*):
            Device; `None` lets Sentence Transformers choose.

    Returns:
        `tuple[SentenceTransformer, str]`: the model, and the folder or id it was loaded from.

    Raises:
        CheckpointMissingError: `"moemb-mini"` was asked for and its checkpoint is not there.
        ModelError: there is no such model, or its files are broken.
    """
    from sentence_transformers import SentenceTransformer

    source = str(mini_repository()) if name == MINI else name
    try:
        return SentenceTransformer(source, trust_remote_code=True, device=device), source
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model '{name}' cannot be loaded by SentenceTransformer: {error}") from error

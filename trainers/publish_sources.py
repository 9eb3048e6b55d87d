"""What a publication is made of: the model, the code that it runs, its recipes, results, licence and texts."""

import json
import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import modeling_moemb

from .convert_safetensors import ConversionError, read_checkpoint, read_json_mapping
from .errors import MoEMBError, nearest
from .evaluation_report import package_versions
from .model_card import UNTRAINED_EMB, license_of
from .quickstart_model import MINI, recipe_folder
from .recipe import RecipeError, load_recipe
from .saliency import weights_fingerprint


# Identifiers of the Hub for the licences that models are under; "other" needs a name and a link of its own.
LICENSES = (
    "apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc0-1.0", "bsd-3-clause", "bsd-2-clause",
    "gpl-3.0", "lgpl-3.0", "agpl-3.0", "mpl-2.0", "openrail", "openrail++", "gemma", "llama3.3", "unlicense", "isc",
    "other",
)  # fmt: skip
SOURCE_FOLDERS = ("modeling_moemb", "trainers", "hub_kernels", "recipes", "pyproject.toml")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_CONFIG_FLAG = re.compile(r"--config[ =](\S+)")


class PublishError(MoEMBError, ValueError):
    """A publication that cannot go on. The message names the item, its value and the remedy."""


@dataclass
class CardSettings:
    """
    What a person says of a model; the rest of a card comes from files.

    Args:
        license (`str`, *optional*): identifier of the Hub, such as `apache-2.0`.
        license_name, license_link (`str`, *optional*): with `license: other`.
        base_model (`str`, *optional*): Hub id that the weights come from.
        description (`str`, *optional*): one paragraph. Figures are cited:
            `{results/evaluation.json#/tasks/0/queries}`.
        limits (`list[str]`, *optional*): a sentence each; figures are cited.
        language (`list[str]`, *optional*): ISO 639 codes.
        datasets (`list[str]`, *optional*): Hub ids of the training data.
        trained (`bool`, *optional*): whether `<emb>` was trained; by default, whether there is a record of a training.
        notices (`list[str]`, *optional*): files that must travel with the model, such as the attribution of its data,
            relative to the card file.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None
    description: str = ""
    limits: list[str] = field(default_factory=list)
    language: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    trained: bool | None = None
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SourceState:
    """The code of this checkout: its commit, when that was made, and what is changed beside it."""

    root: Path
    commit: str | None
    date: str
    changes: tuple[str, ...] = ()


@dataclass
class Sources:
    """
    Everything that a model repository is assembled from.

    Args:
        folder (`Path`): the model: a repository or a training checkpoint.
        state (`SourceState`): the code.
        card (`CardSettings`): texts and licence; `license` is set.
        recipes (`list[Path]`): YAML files of the training.
        results (`dict[str, Path]`): files of measured figures of this model, by their path below `results/`.
        trained (`bool`): whether `<emb>` was trained.
        notices (`list[Path]`): files that must travel with it.
    """

    folder: Path
    state: SourceState
    card: CardSettings
    recipes: list[Path]
    results: dict[str, Path]
    trained: bool
    notices: list[Path] = field(default_factory=list)


def check_id(name: str, flag: str = "--to") -> tuple[str, str]:
    """Splits `ORG/NAME`.

    Raises:
        PublishError: it is no Hub id.
    """
    if not _ID.fullmatch(name) or "--" in name or ".." in name or name.endswith((".git", ".ipynb")):
        raise PublishError(
            f"{flag} {name}: a Hub id is ORG/NAME, each of letters, digits, '-', '_' and '.', without '--' or '..'"
        )
    owner, _, repository = name.partition("/")
    return owner, repository


def source_state(allow_dirty: bool = False) -> SourceState:
    """
    The commit of the code that is published with the model.

    Args:
        allow_dirty (`bool`, *optional*, defaults to `False`): whether changes that no commit holds may travel.

    Raises:
        PublishError: the checkout has such changes, or the code is no checkout and `allow_dirty` is not set.
    """
    root = Path(modeling_moemb.__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        top = Path(git("rev-parse", "--show-toplevel").strip()).resolve()
        if top != root:
            raise FileNotFoundError
        commit, date = git("log", "-1", "--format=%H %cI").split()
        status = git("status", "--porcelain", "--untracked-files=all", "--", *SOURCE_FOLDERS)
    except (OSError, subprocess.CalledProcessError, ValueError):
        if allow_dirty:
            return SourceState(root, None, _newest(root))
        raise PublishError(
            f"the code in {root} is no git checkout, so no commit says what is published; publish from a clone, or "
            "try with --dry-run --allow-dirty"
        ) from None
    changes = tuple(line.strip() for line in status.splitlines())
    if changes and not allow_dirty:
        shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
        raise PublishError(
            f"the checkout {root} has changes that no commit holds ({shown}); commit or remove them, so that the "
            "commit on the card says what was published (a --dry-run may go on with --allow-dirty)"
        )
    return SourceState(root, commit, date, changes)


def _newest(root: Path) -> str:
    import datetime

    newest = max(path.stat().st_mtime for path in (root / "modeling_moemb").glob("*.py"))
    return datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat(timespec="seconds")


def locate(model: str) -> Path:
    """
    The folder of the model to publish.

    Args:
        model (`str`): `"moemb-mini"`, or the folder of a repository or of a checkpoint.

    Raises:
        PublishError: there is no MoEMB model.
    """
    folder = recipe_folder() / "checkpoint" if model == MINI else Path(model).expanduser()
    if not folder.is_dir():
        raise PublishError(f"--model {model}: there is no such folder")
    try:
        settings = read_json_mapping(folder / "config.json")
        read_checkpoint(folder)
    except FileNotFoundError:
        raise PublishError(f"--model {model} has no config.json; name a model repository or a checkpoint") from None
    except ConversionError as error:
        raise PublishError(f"--model {model}: {error}") from error
    if settings.get("model_type") != "moemb":
        raise PublishError(
            f"--model {model} has model_type {settings.get('model_type')!r}; make a MoEMB repository of it with "
            f"'moemb convert --from {model} --to DIR'"
        )
    return folder.resolve()


def gather(
    model: str,
    state: SourceState,
    *,
    license: str | None = None,
    base_model: str | None = None,
    card: Path | None = None,
    recipes: Sequence[Path] = (),
    results: Sequence[Path] = (),
) -> Sources:
    """
    Finds what belongs to a model: what is named, else what lies beside it.

    Args:
        model (`str`): see [`locate`].
        state (`SourceState`): the code.
        license, base_model (`str`, *optional*): instead of the card file's.
        card (`Path`, *optional*): YAML file of [`CardSettings`]; by default `card.yaml` in or above the model's
            folder.
        recipes (`Sequence[Path]`, *optional*): by default those that the training record names.
        results (`Sequence[Path]`, *optional*): JSON files, or folders of them; by default `results` in or beside the
            folder.

    Raises:
        PublishError: no licence, a file that is missing, or results of another model.
    """
    folder = locate(model)
    settings, notices = _card_settings(folder, card)
    settings.license = license or settings.license or license_of(folder)
    settings.base_model = base_model or settings.base_model
    _check_license(settings, folder)
    found = _result_files(folder, results)
    for path in found.values():
        _check_belongs(path, folder)
    trained = settings.trained
    if trained is None:
        readme = folder / "README.md"
        untrained = readme.is_file() and UNTRAINED_EMB in readme.read_text(encoding="utf-8")
        trained = (folder / "training.json").is_file() or not (untrained or not readme.is_file())
    return Sources(folder, state, settings, _recipes(folder, state, recipes), found, trained, notices)


def _card_settings(folder: Path, card: Path | None) -> tuple[CardSettings, list[Path]]:
    """What the card file says, and the notices that it names."""
    if card is None:
        places = (folder / "card.yaml", folder.parent / "card.yaml")
        card = next((path for path in places if path.is_file()), None)
    if card is None:
        return CardSettings(), []
    try:
        (settings,) = load_recipe(card, CardSettings)
    except RecipeError as error:
        raise PublishError(str(error)) from error
    notices = [Path(card).parent / name for name in settings.notices]
    for path in notices:
        if not path.is_file():
            raise PublishError(f"{card} names the notice {path}: there is no such file")
    return settings, notices


def _check_license(settings: CardSettings, folder: Path) -> None:
    name = settings.license
    if not name:
        raise PublishError(
            f"{folder} has no licence: nobody may use a model without one. Pass --license, such as apache-2.0, or "
            "write 'license:' into card.yaml beside the model"
        )
    if name not in LICENSES:
        raise PublishError(f"the licence {name!r} is no identifier of the Hub{nearest(name.lower(), LICENSES)}")
    if name == "other" and not (settings.license_name and settings.license_link):
        raise PublishError("the licence 'other' needs license_name and license_link in card.yaml")


def _recipes(folder: Path, state: SourceState, named: Sequence[Path]) -> list[Path]:
    if named:
        for path in named:
            if not path.is_file():
                raise PublishError(f"--recipe {path}: there is no such file")
        return list(named)
    if kept := sorted((folder / "recipe").glob("*.yaml")):
        return kept
    record = folder / "training.json"
    if not record.is_file():
        return []
    commands = [entry.get("command", "") for entry in read_json_mapping(record).get("commands", [])]
    found = {}
    for word in dict.fromkeys(match for command in commands for match in _CONFIG_FLAG.findall(command)):
        for path in (state.root / word, folder.parent / Path(word).name):
            if path.is_file():
                found[path.resolve()] = None
                break
    return list(found)


def _result_files(folder: Path, named: Sequence[Path]) -> dict[str, Path]:
    """Result files by the path that they get below `results/`."""
    if not named:
        places = (folder / "results", folder.parent / "results" if folder.name == "checkpoint" else folder / "results")
        named = [path for path in dict.fromkeys(places) if path.is_dir()]
    files: dict[str, Path] = {}
    for path in named:
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.suffix in (".json", ".md", ".png", ".csv")]
            files |= {file.relative_to(path).as_posix(): file for file in inside if not file.name.startswith(".")}
        elif path.is_file():
            files[path.name] = path
        else:
            raise PublishError(f"--results {path}: there is no such file or folder")
    return files


def _check_belongs(path: Path, folder: Path) -> None:
    """A figure of another model is worse than none."""
    if path.suffix != ".json":
        return
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PublishError(f"the results {path} are not JSON: {error}; measure again or leave them out") from error
    about: Any = report.get("model") if isinstance(report, dict) else None
    if not isinstance(about, dict):
        return
    total = sum(math.prod(tensor.shape) for tensor in read_checkpoint(folder).values())
    if about.get("parameters", total) != total:
        raise PublishError(
            f"the results {path} are of a model with {about['parameters']:,} parameters, {folder} has {total:,}; "
            "measure this one, or name its results with --results"
        )
    weights = about.get("weights")
    if weights and weights != weights_fingerprint(folder):
        raise PublishError(
            f"the results {path} are of other weights ({weights[:16]}) than {folder} holds; measure this model, or "
            "name its results with --results"
        )


def record_of(sources: Sources, repository: str, kind: str, together: Sequence[str], **more: Any) -> dict[str, Any]:
    """What `publication.json` holds: all that a card says and no other file does. JSON-serialisable."""
    card = sources.card
    return {
        "repository": repository,
        "kind": kind,
        "together": list(together),
        "license": card.license,
        **({"license_name": card.license_name, "license_link": card.license_link} if card.license == "other" else {}),
        "base_model": card.base_model,
        "description": card.description,
        "limits": list(card.limits),
        "language": list(card.language),
        "datasets": list(card.datasets),
        "trained": sources.trained,
        "date": sources.state.date,
        "source": {"commit": sources.state.commit, "dirty": bool(sources.state.changes)},
        "versions": package_versions(),
        **more,
    }

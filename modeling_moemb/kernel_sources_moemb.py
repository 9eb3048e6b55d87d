"""Finds and loads kernel repositories: a path of the user's, the staged build of this environment, the Hub."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


ORGANISATION = "moemb"
VERSION = 1  # of the operations' contract, and so of the repositories on the Hub
REPOSITORIES = {"cpu": ("moemb-cpu",), "cuda": ("moemb-experts", "moemb-gated-delta")}
# version of the signatures in which the model calls its operations; a kernel build of another version is not used
CONTRACT = 1
STAGED = Path(sys.prefix) / "share" / "moemb" / "kernels"
NO_LIBRARY = "the 'kernels' package is not installed: pip install 'kernels>=0.17.2'"


@dataclass(frozen=True)
class KernelSettings:
    """What the user chose.

    Args:
        paths (`tuple[Path, ...]`): kernel repositories, `build` folders or variant folders.
        enabled (`bool`): `False` for the PyTorch path everywhere.
        hub (`bool`): whether the Hub may be asked.
        trust_remote_code (`bool` or `tuple[str, ...]`): passed to `kernels.get_kernel`.
    """

    paths: tuple[Path, ...] = ()
    enabled: bool = True
    hub: bool = False
    trust_remote_code: bool | tuple[str, ...] = False


@dataclass(frozen=True)
class KernelSource:
    """One kernel repository as found for a device.

    Args:
        repository (`str`): its name.
        device (`str`): device type.
        origin (`str`): folder or Hub id; empty when nothing was found.
        module (`ModuleType`, *optional*): the loaded kernel.
        why (`str`): how it was chosen, or why it is not there.
        broken (`bool`): found, but unusable.
    """

    repository: str
    device: str
    origin: str
    module: ModuleType | None
    why: str
    broken: bool = False


def parse_source(source: str | os.PathLike | Sequence[str | os.PathLike]) -> KernelSettings:
    """Settings from `off`, `auto`, `hub`, or paths (a string may name several, separated by `:`)."""
    if isinstance(source, str):
        word = source.strip()
        if word in ("off", "auto", "hub"):
            return KernelSettings(enabled=word != "off", hub=word == "hub")
        source = [part for part in word.split(os.pathsep) if part]
    elif isinstance(source, os.PathLike):
        source = [source]
    return KernelSettings(paths=tuple(Path(path).expanduser() for path in source))


def find_sources(device: str, settings: KernelSettings) -> list[KernelSource]:
    """The kernel repositories for a device type, the first to be asked first; those that are not there say why."""
    known = REPOSITORIES.get(device, ())
    if not settings.enabled:
        why = "switched off by use_kernels or MOEMB_KERNELS"
        return [KernelSource(name, device, "", None, why) for name in known]
    given = {}
    missing = []
    for path in settings.paths:
        names = kernel_names(path)
        if not names:
            why = f"'{path}' holds no kernel build: correct MOEMB_KERNELS, or stage it with hub_kernels/tools/stage.py"
            missing.append(KernelSource(path.name, device, str(path), None, why, broken=True))
        given.update(dict.fromkeys(names, path))
    # a path that holds another kernel than ours is asked first: its user wants to see it run
    own = [_load_path(name, path, device, "given path") for name, path in given.items() if name not in known]
    others = [source for source in own if source.module is not None or source.broken]
    return missing + others + [_find(name, device, settings, given.get(name)) for name in known]


def _find(name: str, device: str, settings: KernelSettings, path: Path | None) -> KernelSource:
    """One of our repositories, by the order of the module's docstring."""
    hub_id = f"{ORGANISATION}/{name}"
    if path is not None:
        return _load_path(name, path, device, "given path")
    redirected = local_kernels().get(hub_id)
    if redirected is not None:
        return _load_path(name, redirected, device, "LOCAL_KERNELS")
    if kernel_names(STAGED / name):
        return _load_path(name, STAGED / name, device, "staged in this environment")
    if settings.hub:
        return _load_hub(name, hub_id, device, settings.trust_remote_code)
    first = staged_status(name)[1].partition("\n")[0]
    return KernelSource(name, device, "", None, f"not staged in this environment: {first}")


def local_kernels() -> dict[str, Path]:
    """The redirections of `LOCAL_KERNELS` (`org/name=path`, separated by `:`); entries of other forms are left out."""
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    pairs = [entry.split("=", 1) for entry in entries if "=" in entry]
    return {hub_id: Path(path) for hub_id, path in pairs}


def staged_status(name: str) -> tuple[str, str]:
    """How the last `make install` went for a repository: `ok`, `no-compiler`, `failed` or `missing`, and its text."""
    try:
        status = json.loads((STAGED / name / "status.json").read_text(encoding="utf-8"))
        return str(status["state"]), str(status["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "missing", "'make install' in a checkout of MoEMB builds it"


def metadata_files(path: Path) -> list[Path]:
    """`metadata.json` of every variant in a repository, its build folder, or a variant folder."""
    return sorted(file for pattern in ("", "*/", "build/*/") for file in path.glob(f"{pattern}metadata.json"))


def kernel_names(path: Path) -> list[str]:
    """Names of the kernels whose builds lie in a folder."""
    names = []
    for file in metadata_files(path):
        try:
            names.append(str(json.loads(file.read_text(encoding="utf-8"))["name"]))
        except (OSError, ValueError, KeyError, TypeError):
            names.append(path.name)  # unreadable, but meant to be one: loading it says what is wrong
    return list(dict.fromkeys(names))


def _library() -> ModuleType | None:
    """The `kernels` library, without which a build cannot be loaded.

    Imported nowhere else: whatever stands outside a `try` becomes a demand on every user of a published model.
    """
    try:
        import kernels
        import kernels._rust
    except ImportError:
        return None
    return kernels


def _load_path(name: str, path: Path, device: str, how: str) -> KernelSource:
    library = _library()
    if library is None:
        return KernelSource(name, device, str(path), None, f"{how} {path} cannot be loaded, {NO_LIBRARY}")
    try:
        variants = variants_for(path, device)
        for variant in variants:
            check_digest(variant)
        if not variants:
            return KernelSource(name, device, str(path), None, f"{how} {path} has no variant for {device}")
        # the backend of a CUDA build of torch would be CUDA for every tensor
        module = library.get_local_kernel(path.resolve(), backend="cpu" if device == "cpu" else None)
        return KernelSource(name, device, str(path), _checked(module), f"{how}: {path}")
    except Exception as error:  # an import of foreign code fails in any way it likes
        why = f"{how} {path} is unusable ({_brief(error)}); build it again with hub_kernels/tools/stage.py, or set "
        return KernelSource(name, device, str(path), None, f"{why}MOEMB_KERNELS=off. The PyTorch path runs.", True)


def _load_hub(name: str, hub_id: str, device: str, trust: bool | tuple[str, ...]) -> KernelSource:
    library = _library()
    if library is None:
        return KernelSource(name, device, hub_id, None, f"{hub_id} cannot be fetched, {NO_LIBRARY}")
    try:
        module = library.get_kernel(
            hub_id,
            version=VERSION,
            backend="cpu" if device == "cpu" else None,
            trust_remote_code=trust if isinstance(trust, bool) else list(trust),
        )
        return KernelSource(name, device, hub_id, _checked(module), f"the Hub: {hub_id}, version {VERSION}")
    except Exception as error:
        why = (
            f"{hub_id} is unusable ({_brief(error)}). To trust it: use_kernels('hub', "
            f"trust_remote_code=['{hub_id}']); to do without: MOEMB_KERNELS=off. The PyTorch path runs."
        )
        return KernelSource(name, device, hub_id, None, why, broken=True)


def variants_for(path: Path, device: str) -> list[Path]:
    """Variant folders below `path` whose backend is `device`."""
    read = _library()._rust.Metadata.read_from_file
    files = metadata_files(path)
    return [file.parent for file in files if str(read(file).backend.backend_type).lower() == device]


def check_digest(variant: Path) -> bool:
    """Compare the files of a variant folder with the hashes in its metadata; `kernels` does not when it loads.

    Returns:
        `bool`: whether the metadata holds hashes at all.

    Raises:
        ValueError: a file is missing, unknown or changed, or the `kernels` package is not installed.
    """
    library = _library()
    if library is None:
        raise ValueError(NO_LIBRARY)
    expected = library._rust.Metadata.read_from_file(variant / "metadata.json").digest
    if expected is None:
        return False
    try:
        expected.validate(_digest(variant, expected.algorithm))
    except Exception as error:
        raise ValueError(f"wrong digest in {variant}: {_brief(error)}") from error
    return True


def _digest(variant: Path, algorithm: object) -> object:
    """The hash of a folder, in which another process may be writing bytecode: its temporary files come and go."""
    hash_variant = _library()._rust.Digest.hash_variant
    for _ in range(4):
        try:
            return hash_variant(algorithm, variant)
        except OSError:
            time.sleep(0.02)
    return hash_variant(algorithm, variant)


def _checked(module: ModuleType) -> ModuleType:
    if not callable(getattr(module, "supports", None)):
        raise ValueError("it has no function supports(op, *tensors)")
    contract = getattr(module, "CONTRACT", None)
    if contract != CONTRACT:
        raise ValueError(
            f"it offers version {contract} of the operations' signatures, this model calls version {CONTRACT}: build "
            "it again with `make install`, or take the release that belongs to the model's code"
        )
    return module


def _brief(error: Exception) -> str:
    violations = [str(violation) for violation in getattr(error, "violations", [])]
    text = "; ".join(violations) or " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:300]}"

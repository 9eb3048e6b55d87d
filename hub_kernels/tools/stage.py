"""Stages a kernel repository without Nix: what `kernels` loads, from what kernel-builder would build.

    python hub_kernels/tools/stage.py moemb-cpu             writes hub_kernels/moemb-cpu/build/<variant>
    python hub_kernels/tools/stage.py --install             all repositories, and into this environment

A compiled repository (`[torch]` in build.toml) becomes one `torch-stable-abi...` variant, a noarch one
(`[torch-noarch]`) a variant per backend. An installed build lies in `<sys.prefix>/share/moemb/kernels/<repo>`, with a
`status.json` that says how the build went; `moemb kernels` shows it. What cannot be built is said, and the exit status
is 3 (of a mistake 1, else 0).
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from compile_sources import (
    BASE_FLAGS,
    NoCompilerError,
    StageError,
    build_library,
    components,
    find_compiler,
    read_settings,
    unlisted_sources,
)
from filelock import FileLock


ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path("share") / "moemb" / "kernels"

NOARCH_OPS = '''"""Namespace of this build's operators; written by the stager."""

import torch


_NAMESPACE = "{namespace}"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an operator in the namespace of this build."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''
COMPILED_OPS = '''"""Loads the compiled library of this build; written by the stager."""

from pathlib import Path

import torch


_NAMESPACE = "{namespace}"
# The same build may lie in two folders (a checkout and an environment): its operators are registered once.
if not torch._C._jit_get_schemas_for_operator(f"{{_NAMESPACE}}::{probe}"):
    torch.ops.load_library(Path(__file__).parent / "{library}")
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an operator in the namespace of this build."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''
# The layout that releases of `kernels` before 0.12 look for.
OLD_LAYOUT = '''"""The module for old releases of `kernels`, which look for it here; written by the stager."""

import importlib.util
import sys
from pathlib import Path


_FILE = Path(__file__).parent.parent / "__init__.py"
_SPEC = importlib.util.spec_from_file_location(f"{name}_compat", _FILE)
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
globals().update({{key: value for key, value in vars(_MODULE).items() if not key.startswith("__")}})
'''


def python_sources(repo: Path, name: str) -> list[Path]:
    """Files of the Python module that travel into a variant."""
    folder = repo / "torch-ext" / name
    if not (folder / "__init__.py").is_file():
        raise StageError(f"{folder / '__init__.py'}: there is no such file; build.toml names the module '{name}'")
    skipped = ("__pycache__", "_ops.py")
    return sorted(p for p in folder.rglob("*") if p.is_file() and not set(p.parts) & set(skipped))


def identity(repo: Path, settings: dict, name: str, leave_out: list[str]) -> str:
    """Ten hex digits of everything that goes into a build: sources, flags, compiler."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in [*python_sources(repo, name), Path(__file__)]:
        digest.update(path.name.encode() + path.read_bytes())
    if "torch" in settings:
        digest.update(repr([BASE_FLAGS, find_compiler()[1], leave_out]).encode())
        for component in components(repo, settings):
            for source in component.sources:
                digest.update(source.encode() + (repo / source).read_bytes())
    return digest.hexdigest()[:10]


def planned_variants(settings: dict) -> list[tuple[str, str]]:
    """`(variant, backend)` of every variant that build.toml asks for."""
    if "torch" in settings:
        version = settings["torch"]["stable-abi"]["cpu"].replace(".", "")
        return [(f"torch-stable-abi{version}-cpu-x86_64-linux", "cpu")]
    return [(f"torch-{backend}", backend) for backend in settings["general"]["backends"]]


def is_current(variant: Path, identifier: str) -> bool:
    """Whether a variant folder holds this very build, unharmed."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
        if metadata.id != identifier:
            return False
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except Exception:  # missing, unreadable or changed: build it again
        return False
    return True


def write_metadata(variant: Path, settings: dict, identifier: str, backend: str) -> None:
    """Write metadata.json with the digest of all other files."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    general = settings["general"]
    metadata = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "license": general["license"],
        "python-depends": general.get("python-depends", []),
        "kernel-depends": [],
        "backend": {"type": backend},
    }
    path = variant / "metadata.json"
    path.write_text(json.dumps(metadata), encoding="utf-8")
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": digest.files}
    path.write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    Metadata.read_from_file(path).digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def try_loading(variant: Path, backend: str) -> None:
    """Load a compiled variant in a process of its own: missing symbols show only there."""
    code = f"import kernels, pathlib; kernels.get_local_kernel(pathlib.Path({str(variant)!r}), backend={backend!r})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if result.returncode:
        raise StageError(f"{variant} was built but does not load:\n{result.stderr.strip()}")


def replace_folder(source: Path, target: Path) -> None:
    """Put a finished folder in place of an older one; a process that loaded the old one keeps its files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    trash = target.parent / f".old-{target.name}-{os.getpid()}"
    if target.exists():
        os.rename(target, trash)
    os.rename(source, target)
    shutil.rmtree(trash, ignore_errors=True)


def stage(repo: Path, jobs: int = 1, leave_out: list[str] | None = None) -> list[Path]:
    """Build what is missing or outdated below `repo/build`.

    Args:
        repo (`Path`): the kernel repository.
        jobs (`int`, *optional*, defaults to 1): compilers at a time.
        leave_out (`list[str]`, *optional*): glob patterns of sources to leave out.

    Returns:
        `list[Path]`: the variant folders.

    Raises:
        StageError: the build fails.
        NoCompilerError: a compiled repository on a machine that cannot compile it.
    """
    leave_out = leave_out or []
    settings = read_settings(repo)
    name = settings["general"]["name"].replace("-", "_")
    if "torch" in settings:
        for source in unlisted_sources(repo, settings):
            print(f"  {repo.name}: build.toml does not list {source}: it is not built", file=sys.stderr)
    uid = identity(repo, settings, name, leave_out)
    variants = []
    for variant_name, backend in planned_variants(settings):
        identifier = f"_{name}_{backend}_{uid}"
        variant = repo / "build" / variant_name
        variants.append(variant)
        if is_current(variant, identifier):
            continue
        variant.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(variant.parent / ".lock"):
            if is_current(variant, identifier):  # built by another process meanwhile
                continue
            scratch = repo / "build" / f".staging-{os.getpid()}" / variant_name
            shutil.rmtree(scratch.parent, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                _fill(scratch, repo, settings, name, identifier, jobs, leave_out)
                write_metadata(scratch, settings, identifier, backend)
                if "torch" in settings:
                    try_loading(scratch, backend)
                replace_folder(scratch, variant)
            finally:
                shutil.rmtree(scratch.parent, ignore_errors=True)
        print(f"  staged {variant.relative_to(repo.parent)} ({identifier})")
    return variants


def _fill(
    variant: Path, repo: Path, settings: dict, name: str, identifier: str, jobs: int, leave_out: list[str]
) -> None:
    module = repo / "torch-ext" / name
    for path in python_sources(repo, name):
        target = variant / path.relative_to(module)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    if "torch" in settings:
        library = f"{identifier}.abi3.so"
        build_library(repo, settings, identifier, variant / library, jobs, leave_out)
        text = COMPILED_OPS.format(namespace=identifier, library=library, probe="isa")
    else:
        text = NOARCH_OPS.format(namespace=identifier)
    (variant / "_ops.py").write_text(text, encoding="utf-8")
    (variant / name).mkdir()
    (variant / name / "__init__.py").write_text(OLD_LAYOUT.format(name=identifier), encoding="utf-8")


def write_status(folder: Path, state: str, message: str) -> None:
    """Leave word of how an installation went, for `moemb kernels`."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".status-{os.getpid()}"
    scratch.write_text(json.dumps({"state": state, "message": message}, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, folder / "status.json")


def install(repo: Path, prefix: Path, jobs: int = 1) -> bool:
    """Stage a repository and copy its variants into an environment.

    Args:
        repo (`Path`): the kernel repository.
        prefix (`Path`): root of the environment (`sys.prefix`).
        jobs (`int`, *optional*, defaults to 1): compilers at a time.

    Returns:
        `bool`: whether the environment now holds the current build. When it cannot be built, the text of the error is
        printed and kept, and a build that was installed before is removed: it would not be that of these sources.
    """
    folder = prefix / INSTALLED / repo.name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return _install(repo, folder, jobs)


def _install(repo: Path, folder: Path, jobs: int) -> bool:
    try:
        variants = stage(repo, jobs)
    except NoCompilerError as error:
        shutil.rmtree(folder / "build", ignore_errors=True)
        write_status(folder, "no-compiler", str(error))
        print(f"{repo.name}: {error}; the PyTorch path is used instead")
        return False
    except StageError as error:
        shutil.rmtree(folder / "build", ignore_errors=True)
        write_status(folder, "failed", str(error))
        print(f"{repo.name}: {error}\n{repo.name}: not installed; the PyTorch path is used instead", file=sys.stderr)
        return False
    wanted = {variant.name for variant in variants}
    for old in (folder / "build").glob("*"):
        if old.name not in wanted:
            shutil.rmtree(old)
    for variant in variants:
        target = folder / "build" / variant.name
        identifier = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
        if is_current(target, identifier):
            continue
        scratch = folder / f".staging-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(variant, scratch, ignore=shutil.ignore_patterns("__pycache__"))
        replace_folder(scratch, target)
        print(f"  installed {target}")
    write_status(folder, "ok", "")
    return True


def repositories(names: list[str]) -> list[Path]:
    """Folders of the named repositories, all of them when none is named."""
    known = sorted(path.parent.name for path in ROOT.glob("*/build.toml"))
    for name in names:
        if name not in known:
            raise StageError(f"there is no kernel repository '{name}'; there are {', '.join(known)}")
    return [ROOT / name for name in names or known]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repos", nargs="*", help="folder names below hub_kernels/ (default: all)")
    parser.add_argument(
        "--install", action="store_true", help="copy into this environment; a failed build is not fatal"
    )
    parser.add_argument(
        "--prefix", type=Path, default=Path(sys.prefix), help="root of the environment to install into"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time (default: 1)")
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="GLOB", help="do not compile these sources"
    )
    args = parser.parse_args(argv)
    complete = True
    try:
        for repo in repositories(args.repos):
            if args.install:
                complete &= install(repo, args.prefix, args.jobs)
            else:
                stage(repo, args.jobs, args.leave_out)
    except StageError as error:
        print(f"stage: error: {error}", file=sys.stderr)
        return 1
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())

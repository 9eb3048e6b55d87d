"""Compiles and links the sources that a kernel repository's build.toml lists, with a cache of objects.

An object is reused when its source, every header of the repository it includes, the flags and the compiler's version
are the same: the file name of a cached object is the hash of these.
"""

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path


BASE_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra"]
BASE_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # g++ 12's own AVX-512 headers (GCC bug 105593)
SOURCE_SUFFIXES = {".cpp", ".cc", ".c"}
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class StageError(Exception):
    """A build that cannot go on; the text names the file and the remedy."""


class NoCompilerError(StageError):
    """This machine cannot build the sources at all; a user may go on without them."""


@dataclass(frozen=True)
class Component:
    """One `[kernel.*]` or `[torch]` section: sources that share flags.

    Args:
        name (`str`): the section's name.
        sources (`list[str]`): paths relative to the repository; headers are listed too.
        flags (`list[str]`): flags of these sources alone.
        include (`list[str]`): include folders relative to the repository.
        binding (`bool`): whether the sources include torch's headers and know the operators' namespace.
    """

    name: str
    sources: list[str]
    flags: list[str]
    include: list[str]
    binding: bool


def read_settings(repo: Path) -> dict:
    """The parsed build.toml of a repository, checked by the `kernels` library itself.

    Raises:
        StageError: there is no valid build.toml.
    """
    from kernels._rust import Build

    path = repo / "build.toml"
    if not path.is_file():
        raise StageError(f"{path}: there is no such file; a kernel repository needs a build.toml")
    try:
        Build.open(repo)
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises its own kinds
        raise StageError(f"{path}: {error}") from error


def components(repo: Path, settings: dict) -> list[Component]:
    """The components of a compiled repository, the binding first; every listed file must exist.

    Raises:
        StageError: a listed file is missing.
    """
    sections = [("torch", settings["torch"], True)]
    sections += [(name, section, False) for name, section in settings.get("kernel", {}).items()]
    found = []
    for name, section, binding in sections:
        for source in section["src"]:
            if not (repo / source).is_file():
                raise StageError(f"{repo / 'build.toml'}: [{name}] lists {source}, which does not exist")
        found.append(
            Component(name, section["src"], section.get("cxx-flags", []), section.get("include", []), binding)
        )
    return found


def unlisted_sources(repo: Path, settings: dict) -> list[str]:
    """Sources below csrc/ and torch-ext/ that no section of build.toml lists: they would silently be left out."""
    listed = {source for component in components(repo, settings) for source in component.sources}
    suffixes = SOURCE_SUFFIXES | {".h"}
    present = [path for folder in ("csrc", "torch-ext") for path in (repo / folder).rglob("*")]
    return sorted(
        name
        for path in present
        if path.suffix in suffixes and (name := path.relative_to(repo).as_posix()) not in listed
    )


def find_compiler() -> tuple[list[str], str]:
    """The C++ compiler (`CXX` or g++) and its version line.

    Raises:
        NoCompilerError: there is none, or this machine is not an x86-64 Linux.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise NoCompilerError(f"the compiled kernels need x86-64 Linux, this is {sys.platform} {platform.machine()}")
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or shutil.which(command[0]) is None:
        raise NoCompilerError(
            f"there is no C++ compiler '{shlex.join(command)}' (install g++ 9 or newer, or set CXX, and run it again)"
        )
    result = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if result.returncode:
        raise NoCompilerError(f"'{shlex.join(command)} --version' failed: {result.stderr.strip()}")
    return command, result.stdout.splitlines()[0]


def torch_folders() -> tuple[Path, Path]:
    """Include and library folder of the installed torch, found without importing it.

    Raises:
        StageError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise StageError("torch is not installed in this environment: compile with the Python that has it")
    root = Path(spec.origin).parent
    return root / "include", root / "lib"


def _with_headers(path: Path, folders: list[Path], seen: dict[Path, bytes]) -> None:
    """Collect `path` and every header of the repository that it includes, with their contents."""
    if path in seen:
        return
    seen[path] = path.read_bytes()
    for name in INCLUDE.findall(seen[path]):
        for folder in (path.parent, *folders):
            header = (folder / name.decode()).resolve()
            if header.is_file():
                _with_headers(header, folders, seen)
                break


def flags_of(repo: Path, component: Component, settings: dict, namespace: str) -> list[str]:
    """All compiler flags of a component, in order."""
    flags = [*BASE_FLAGS, *component.flags]
    flags += [f"-I{repo / folder}" for folder in component.include]
    if component.binding:
        major, minor = settings["torch"]["stable-abi"]["cpu"].split(".")
        target = (int(major) << 56) | (int(minor) << 48)
        # -isystem: warnings inside torch's headers are not ours
        flags += [f"-DTORCH_EXTENSION_NAME={namespace}", f"-DTORCH_TARGET_VERSION={target:#x}ull"]
        flags += ["-isystem", str(torch_folders()[0])]
    return flags


def _compile_one(repo: Path, source: str, flags: list[str], compiler: list[str], version: str, cache: Path) -> Path:
    contents: dict[Path, bytes] = {}
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    _with_headers((repo / source).resolve(), folders, contents)
    if not any(b"TORCH_EXTENSION_NAME" in text for text in contents.values()):
        # the namespace changes with every source of the repository: files that do not use it are not compiled again
        flags = [flag for flag in flags if not flag.startswith("-DTORCH_EXTENSION_NAME=")]
    digest = hashlib.sha256()
    torch_version = importlib.metadata.version("torch") if "-isystem" in flags else ""
    # paths are left out: the same sources in another checkout are the same object
    digest.update(repr([source, [f for f in flags if str(repo) not in f], version, torch_version]).encode())
    for path in sorted(contents):
        digest.update(path.name.encode() + hashlib.sha256(contents[path]).digest())
    target = cache / f"{Path(source).stem}-{digest.hexdigest()[:24]}.o"
    if target.is_file():
        return target
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler, *flags, "-c", str(repo / source), "-o", str(scratch)]
    print(f"  compiling {source}", flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        scratch.unlink(missing_ok=True)
        raise StageError(f"{repo / source} does not compile:\n{result.stderr.strip()}\ncommand: {shlex.join(command)}")
    if result.stderr.strip():
        print(result.stderr.strip(), file=sys.stderr)
    os.replace(scratch, target)
    return target


def build_library(repo: Path, settings: dict, namespace: str, output: Path, jobs: int, leave_out: list[str]) -> None:
    """Compile every source of build.toml and link them into `output`.

    Args:
        repo (`Path`): the kernel repository.
        settings (`dict`): its build.toml.
        namespace (`str`): namespace of the operators.
        output (`Path`): the shared library to write; replaced by rename.
        jobs (`int`): compilers at a time.
        leave_out (`list[str]`): glob patterns of sources to leave out; for work on one family at a time.

    Raises:
        StageError: a source does not compile or the objects do not link.
        NoCompilerError: there is no compiler.
    """
    compiler, version = find_compiler()
    cache = repo / "build" / ".objects"
    cache.mkdir(parents=True, exist_ok=True)
    tasks = []
    for component in components(repo, settings):
        flags = flags_of(repo, component, settings, namespace)
        for source in component.sources:
            if Path(source).suffix not in SOURCE_SUFFIXES:
                continue
            if any(Path(source).match(pattern) for pattern in leave_out):
                print(f"  LEFT OUT {source}: operators of this build are missing", file=sys.stderr)
                continue
            tasks.append((repo, source, flags, compiler, version, cache))
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        objects = list(pool.map(lambda task: _compile_one(*task), tasks))
    _, library_folder = torch_folders()
    scratch = output.with_suffix(f".{os.getpid()}.tmp")
    # No -fopenmp here: the OpenMP functions come from the runtime that torch itself depends on. Naming libgomp would
    # load a second one beside a torch that renamed its own, and two runtimes oversubscribe the cores.
    command = [*compiler, "-shared", "-o", str(scratch), *map(str, objects), f"-L{library_folder}"]
    command += ["-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--as-needed", "-Wl,-Bsymbolic", "-Wl,--build-id=none", "-s"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        scratch.unlink(missing_ok=True)
        raise StageError(f"{repo} does not link:\n{result.stderr.strip()}\ncommand: {shlex.join(command)}")
    os.replace(scratch, output)

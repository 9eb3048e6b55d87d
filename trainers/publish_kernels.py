"""The kernel repositories of a publication: staged builds and their sources, with cards from facts.

What an operation does is said by the repository's `CARD.md`; versions, backends, symbols and digests come from
`metadata.json` of each build, measured figures from `results/*.json` that `moemb bench --suite kernels` wrote.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .evaluation_report import package_versions
from .model_card_results import read_json
from .publish_assemble import Tree, tree_folder, write_record
from .publish_sources import PublishError, SourceState


TOOLS = Path("hub_kernels") / "tools"
RESULTS = Path("recipes") / "bench" / "results"
CARD_SOURCE = "CARD.md"
# What travels beside the builds: enough to build them again.
SOURCE_FILES = ("build.toml", "flake.nix", "flake.lock", CARD_SOURCE)
SOURCE_FOLDERS = ("torch-ext", "csrc", "benchmarks", "tests", "results")


def kernel_names(state: SourceState) -> list[str]:
    """Names of the kernel repositories of a checkout."""
    return sorted(path.parent.name for path in (state.root / "hub_kernels").glob("*/build.toml"))


def choose_kernels(state: SourceState, wanted: Sequence[str] | None) -> list[str]:
    """
    The kernel repositories to publish.

    Args:
        state (`SourceState`): the checkout.
        wanted (`Sequence[str]`, *optional*): names; all by default.

    Raises:
        PublishError: a name that is none, or the code comes without kernel sources.
    """
    known = kernel_names(state)
    if wanted is None and not known:
        raise PublishError(
            f"there are no kernel repositories in {state.root / 'hub_kernels'}: publish from a checkout, or leave "
            "them out with --no-kernels"
        )
    for name in wanted or ():
        if name not in known:
            raise PublishError(f"--kernels {name}: there is no such kernel repository; there are {', '.join(known)}")
    return list(wanted if wanted is not None else known)


def kernel_reports(state: SourceState) -> list[Path]:
    """The reports of `moemb bench --suite kernels` that a checkout holds, in `recipes/bench/results`."""
    found = []
    for path in sorted((state.root / RESULTS).glob("*.json")):
        report = read_json(path)
        if isinstance(report, dict) and report.get("suite") == "kernels":
            found.append(path)
    return found


def stage_kernels(state: SourceState, names: Sequence[str]) -> None:
    """
    Builds what is missing or outdated, and checks sources, builds and every route that loads them.

    Raises:
        PublishError: a repository does not build or breaks a rule; the message is the tool's.
    """
    for tool in ("stage.py", "check.py"):
        command = [sys.executable, str(state.root / TOOLS / tool), *names]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip())[-4000:]
            raise PublishError(f"hub_kernels/tools/{tool} {' '.join(names)} found:\n{said}\nNothing was published")


def assemble_kernel(
    state: SourceState, root: Path, name: str, owner: str, together: Sequence[str], results: Sequence[Path] = ()
) -> Tree:
    """
    Writes the tree of a kernel repository that is staged.

    Args:
        state (`SourceState`): the checkout.
        root (`Path`): folder of the publication.
        name (`str`): the repository's name.
        owner (`str`): the organisation that it is published under.
        together (`Sequence[str]`): ids of what is published with it.
        results (`Sequence[Path]`, *optional*): measurements of its operations.

    Returns:
        `Tree`
    """
    source, repository = state.root / "hub_kernels" / name, f"{owner}/{name}"
    folder = tree_folder(root, repository, "kernel")
    folder.mkdir(parents=True)
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.pyc")
    shutil.copytree(source / "build", folder / "build", ignore=skipped)
    for part in SOURCE_FOLDERS:
        if (source / part).is_dir():
            shutil.copytree(source / part, folder / part, ignore=skipped)
    for part in SOURCE_FILES:
        if (source / part).is_file():
            text = (source / part).read_text(encoding="utf-8")
            # the sources name the organisation that they were written for
            (folder / part).write_text(re.sub(rf"\b[\w.-]+/{re.escape(name)}\b(?=[\"'])", repository, text), "utf-8")
    for path in results:
        (folder / "results").mkdir(exist_ok=True)
        shutil.copy(path, folder / "results" / path.name)
    if (state.root / "LICENSE").is_file():
        shutil.copy(state.root / "LICENSE", folder / "LICENSE")
    about = {
        "repository": repository,
        "kind": "kernel",
        "together": list(together),
        "license": "apache-2.0",
        "date": state.date,
        "source": {"commit": state.commit, "dirty": bool(state.changes)},
        "versions": package_versions() | {"kernels": _version("kernels")},
    }
    write_record(folder, about)
    return Tree(repository, "kernel", "kernel", folder)


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


def build_variants(folder: Path) -> list[dict[str, Any]]:
    """`metadata.json` of every build of a kernel repository, with the name of its folder as `variant`."""
    return [
        read_json(path) | {"variant": path.parent.name} for path in sorted((folder / "build").glob("*/metadata.json"))
    ]


def kernel_card(folder: Path, about: dict[str, Any]) -> str:
    """
    The card of a kernel repository, from its files.

    Args:
        folder (`Path`): the repository.
        about (`dict`): its publication record.
    """
    text = (folder / CARD_SOURCE).read_text(encoding="utf-8").rstrip()
    rows = [
        f"| `{build['variant']}` | {build['backend']['type']} | {build['version']} | `{build['id']}` | "
        f"{len(build['digest']['files'])} |"
        for build in build_variants(folder)
    ]
    commit = about["source"]["commit"]
    made = f" Made from commit `{commit}`." if commit else ""
    lines = [
        text,
        "",
        "## In this repository",
        "",
        "| build | backend | version | id | files in its digest |",
        "| --- | --- | --- | --- | ---: |",
        *rows,
        "",
        f"The sources are beside the builds; `tests/` holds the tests, `manifest.json` sizes and hashes.{made} "
        f"Staged and checked with {', '.join(f'{name} {version}' for name, version in about['versions'].items())}.",
        "",
        "## Measured",
        "",
        *measured_part(folder),
        "",
        "## Published together",
        "",
        *(f"- [{name}](https://huggingface.co/{name})" for name in about["together"]),
    ]
    return "\n".join(lines) + "\n"


def measured_part(folder: Path) -> list[str]:
    """Tables of `moemb bench --suite kernels`; what was not measured is said to be so."""
    from .benchmark_kernels import rows
    from .benchmark_report import markdown_table

    lines: list[str] = []
    for path in sorted((folder / "results").glob("*.json")):
        report = read_json(path)
        good = [case for case in report.get("cases", []) if "failed" not in case]
        if report.get("suite") != "kernels" or not good:
            raise PublishError(
                f"{path} is no report of 'moemb bench --suite kernels' with measured cases; leave it out"
            )
        machine = report["machine"]
        lines += [
            f"`results/{path.name}`: medians of {report['protocol']['rounds']} interleaved rounds on "
            f"{machine['processor']}, threads: {machine['threads']}. The peer is the fastest of transformers' ways.",
            "",
        ]
        lines += [*markdown_table(rows(good)), ""]
    return lines[:-1] or ["No measurement of these builds travels with this repository."]


__all__ = ["assemble_kernel", "build_variants", "choose_kernels", "kernel_card", "kernel_names", "stage_kernels"]

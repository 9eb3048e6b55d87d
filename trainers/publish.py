"""`moemb publish`: a model, its plain variant, an adapter and the kernels become repositories of the Hub, together.

Everything is assembled in a folder first, checked, loaded in fresh processes and compared with the source; only then
is anything uploaded, in one commit per repository. `--dry-run DIR` stops before the upload and leaves exactly the
trees.
"""

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


HELP = "publish a model, its plain variant, an adapter and the kernels on the Hub, checked and together"
PLAN = "plan.json"
JOURNAL = "created.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moemb publish`."""
    parser.add_argument("--model", required=True, metavar="DIR", help="repository or checkpoint, or 'moemb-mini'")
    parser.add_argument("--to", required=True, metavar="ORG/NAME", help="Hub id of the model")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="write the trees into DIR and upload nothing")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="publish this peft adapter too, as ORG/NAME-adapter"
    )
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain variant, ORG/NAME-plain")
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--kernels", nargs="+", metavar="NAME", help="publish these kernel repositories (all)")
    kernels.add_argument("--no-kernels", action="store_true", help="publish no kernel repository")
    parser.add_argument(
        "--kernel-results",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="reports of 'moemb bench --suite kernels' for the kernel cards (default: those in recipes/bench/results)",
    )
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="files or folders of measured results (default: 'results' beside the model)",
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="recipes that made the model (default: those its training record names)",
    )
    parser.add_argument(
        "--card",
        type=Path,
        metavar="FILE",
        help="YAML of licence, description, limits... (default: card.yaml beside it)",
    )
    parser.add_argument("--license", help="identifier of the Hub, such as apache-2.0")
    parser.add_argument("--base-model", metavar="ID", help="Hub id that the weights come from")
    parser.add_argument("--private", action="store_true", help="new repositories stay private")
    parser.add_argument("--revision", help="branch to commit to (default main)")
    parser.add_argument("--message", help="message of the commits")
    parser.add_argument(
        "--device",
        help="where vectors are compared: cpu (default), cuda, or auto for models that fit no single device",
    )
    parser.add_argument(
        "--allow-dirty", action="store_true", help="with --dry-run: go on although something is uncommitted"
    )


@dataclass
class Plan:
    """
    What will be published.

    Args:
        repository (`str`): Hub id of the model.
        sources (`Sources`): what it is made of.
        kernels (`list[str]`): names of kernel repositories.
        plain (`bool`): whether a plain variant is made.
        adapter (`Path`, *optional*): peft adapter.
        kernel_results (`list[Path]`): measurements of kernels.
        device (`str`, *optional*): where vectors are compared.
    """

    repository: str
    sources: Any
    kernels: list[str]
    plain: bool = True
    adapter: Path | None = None
    kernel_results: list[Path] = field(default_factory=list)
    device: str | None = None

    @property
    def owner(self) -> str:
        return self.repository.split("/")[0]

    def ids(self) -> dict[str, str]:
        """Hub id of every repository by what it is; kernels by their name."""
        ids = {"model": self.repository}
        if self.plain:
            ids["plain"] = f"{self.repository}-plain"
        if self.adapter is not None:
            ids["adapter"] = f"{self.repository}-adapter"
        return ids | {name: f"{self.owner}/{name}" for name in self.kernels}

    def others(self, kind: str) -> list[str]:
        """Addresses of all repositories but one; those of kernels begin with `kernels/`."""
        return [f"kernels/{name}" if key in self.kernels else name for key, name in self.ids().items() if key != kind]

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the trees."""
        sources = self.sources
        files = [*sources.folder.glob("*"), *sources.recipes, *sources.results.values(), *self.kernel_results]
        files += [*self.adapter.glob("*")] if self.adapter is not None else []
        said = {
            "ids": self.ids(),
            "commit": sources.state.commit,
            "card": vars(sources.card),
            "files": sorted(
                (str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()
            ),
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def run(args: argparse.Namespace) -> int:
    """Publish as the flags say, or write the trees; print what is where."""
    from .publish_sources import PublishError

    if args.allow_dirty and args.dry_run is None:
        raise PublishError("--allow-dirty goes with --dry-run alone: what is published must be in a commit")
    plan = make_plan(args)
    if args.dry_run is not None:
        rows = dry_run(plan, args.dry_run)
        print(_summary(rows, args.dry_run))
        return 0
    rows, commits = publish(plan, private=args.private, revision=args.revision, message=args.message)
    print(_summary(rows, None))
    for address in commits:
        print(address)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """
    Reads the flags and finds the sources; writes nothing.

    Raises:
        PublishError: an id, a file, the licence or the checkout is not as it must be.
    """
    from .convert_safetensors import read_checkpoint
    from .publish_adapter import check_adapter
    from .publish_kernels import choose_kernels, kernel_reports
    from .publish_plain import PlainError, plain_config, plan_plain
    from .publish_sources import PublishError, check_id, gather, source_state

    check_id(args.to)
    state = source_state(args.allow_dirty)
    sources = gather(
        args.model, state, license=args.license, base_model=args.base_model, card=args.card, recipes=args.recipe,
        results=args.results,
    )  # fmt: skip
    kernels = [] if args.no_kernels else choose_kernels(state, args.kernels)
    if args.adapter is not None:
        check_adapter(args.adapter)
    for path in args.kernel_results:
        if not path.is_file():
            raise PublishError(f"--kernel-results {path}: there is no such file")
    measured = list(args.kernel_results) or kernel_reports(state)
    if not args.no_plain:
        try:
            plan_plain(read_checkpoint(sources.folder), plain_config(sources.folder))
        except PlainError as error:
            raise PublishError(f"there is no plain variant of this model ({error}); pass --no-plain") from error
    return Plan(args.to, sources, kernels, not args.no_plain, args.adapter, measured, args.device)


def assemble(plan: Plan, root: Path) -> list:
    """
    Writes every tree of a plan below a folder.

    Args:
        plan (`Plan`): what to publish.
        root (`Path`): an empty folder.

    Returns:
        `list[Tree]`: kernels first, the model last: what it names is there before it.
    """
    from .publish_adapter import assemble_adapter
    from .publish_assemble import assemble_model, assemble_plain, check_disk
    from .publish_kernels import assemble_kernel, stage_kernels

    ids, sources = plan.ids(), plan.sources
    check_disk(sources, root, 1 + plan.plain)
    if plan.kernels:
        stage_kernels(sources.state, plan.kernels)
    trees = [
        assemble_kernel(sources.state, root, name, plan.owner, plan.others(name), _measured(plan, name))
        for name in plan.kernels
    ]
    if plan.plain:
        trees.append(assemble_plain(sources, root, ids["plain"], plan.repository, plan.others("plain")))
    if plan.adapter is not None:
        trees.append(
            assemble_adapter(sources, plan.adapter, root, ids["adapter"], plan.repository, plan.others("adapter"))
        )
    trees.append(assemble_model(sources, root, plan.repository, plan.others("model")))
    return trees


def _measured(plan: Plan, name: str) -> list[Path]:
    """Measurements that ran on this kernel repository."""
    chosen = []
    for path in plan.kernel_results:
        report = json.loads(path.read_text(encoding="utf-8"))
        if any(row.get("source") == name for row in report.get("kernels", [])):
            chosen.append(path)
    return chosen


def build(plan: Plan, root: Path) -> tuple[list, list[dict[str, Any]]]:
    """
    Assembles, checks and compares.

    Args:
        plan (`Plan`): what to publish.
        root (`Path`): an empty folder.

    Returns:
        `tuple[list[Tree], list[dict]]`: the trees, and what the comparison with the source gave.

    Raises:
        PublishError: a rule is broken (all findings are named), or vectors differ.
    """
    from .publish_checks import check_tree, describe
    from .publish_sources import PublishError
    from .publish_verify import verify

    trees = assemble(plan, root)
    findings = [finding for tree in trees for finding in check_tree(tree)]
    if findings:
        raise PublishError(f"{len(findings)} findings:\n{describe(findings)}\nNothing was published")
    rows = verify(plan.sources.folder, trees, plan.adapter, plan.device)
    listed = [
        {
            "repository": tree.repository,
            "type": tree.repo_type,
            "kind": tree.kind,
            "folder": tree.folder.relative_to(root).as_posix(),
            "bytes": sum(path.stat().st_size for path in tree.folder.rglob("*") if path.is_file()),
        }
        for tree in trees
    ]
    # last, so that a folder without it is known to be unfinished
    (root / PLAN).write_text(json.dumps({"repositories": listed, "compared": rows}, indent=2) + "\n", "utf-8")
    return trees, listed


def dry_run(plan: Plan, target: Path) -> list[dict[str, Any]]:
    """
    Writes exactly the trees that would be uploaded: `models/ORG/NAME`, `kernels/ORG/NAME`, and `plan.json`.

    Args:
        plan (`Plan`): what to publish.
        target (`Path`): the folder to make; it appears only when all checks have passed.

    Returns:
        `list[dict]`: a row per repository.

    Raises:
        PublishError: the target exists, or see [`build`].
    """
    from .publish_sources import PublishError

    target = target.expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise PublishError(f"--dry-run {target} exists already; remove it or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.assembling-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _, rows = build(plan, draft)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return rows


def publish(
    plan: Plan, *, private: bool = False, revision: str | None = None, message: str | None = None, api: Any = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """
    Assembles, checks, compares and uploads. What was assembled is kept until all commits are in: a run that was
    interrupted goes on with the upload.

    Args:
        plan (`Plan`): what to publish.
        private (`bool`, *optional*, defaults to `False`): whether new repositories stay private.
        revision (`str`, *optional*): branch; `main` by default.
        message (`str`, *optional*): message of the commits.
        api (`HfApi`, *optional*): client of the Hub.

    Returns:
        `tuple[list[dict], list[str]]`: a row per repository, and the addresses of the commits.
    """
    from .publish_upload import upload

    root = _staging(plan)
    trees, rows = _staged(root) if (root / PLAN).is_file() else (None, None)
    if trees is None:
        draft = root.with_name(f".{root.name}.assembling-{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            build(plan, draft)
            shutil.rmtree(root, ignore_errors=True)
            draft.rename(root)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        trees, rows = _staged(root)
    commit = plan.sources.state.commit
    message = message or f"Publish {plan.repository}" + (f" from {commit[:12]}" if commit else "")
    commits = upload(trees, journal=root / JOURNAL, message=message, private=private, revision=revision, api=api)
    shutil.rmtree(root, ignore_errors=True)
    return rows, commits


def _staging(plan: Plan) -> Path:
    from .corpus_sources import cache_folder

    name = f"{plan.repository.replace('/', '--')}-{plan.fingerprint()[:16]}"
    return cache_folder() / "publish" / name


def _staged(root: Path) -> tuple[list, list[dict[str, Any]]]:
    """The trees of an earlier run, whose files must still be those of their manifests."""
    from .publish_assemble import Tree
    from .publish_manifest import manifest_findings
    from .publish_sources import PublishError

    rows = json.loads((root / PLAN).read_text(encoding="utf-8"))["repositories"]
    trees = [Tree(row["repository"], row["type"], row["kind"], root / row["folder"]) for row in rows]
    for tree in trees:
        for name, rule in manifest_findings(tree.folder):
            raise PublishError(f"{tree.folder / name} {rule}; remove {root} and publish again")
    return trees, rows


def _summary(rows: Sequence[dict[str, Any]], folder: Path | None) -> str:
    lines = [f"{row['repository']} ({row['kind']}): {row['bytes'] / 1e6:.1f} MB, {row['folder']}" for row in rows]
    lines.append("checked, and compared with the source in fresh processes: no difference")
    if folder is not None:
        lines.append(f"nothing was uploaded; the trees are in {folder}")
    return "\n".join(lines)

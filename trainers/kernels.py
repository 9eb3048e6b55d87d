"""`moemb kernels`: which kernels run here, for each operation and device, where they come from and why not."""

import argparse
import dataclasses
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any


HELP = "show which fast kernels are active here, and why the others are not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def collect() -> dict[str, Any]:
    """Everything that the command shows.

    Returns:
        `dict`: `versions`, `setting`, `staged` (repositories of this environment), `loaded` (repositories in use) and
        `operations` (one row per operation and device).
    """
    import torch

    from modeling_moemb import kernels_report

    return {
        "versions": {name: _version(name) for name in ("torch", "transformers", "kernels", "triton")},
        "threads": torch.get_num_threads(),
        "setting": _setting(),
        "staged": _staged(),
        "loaded": _loaded(["cpu"] + (["cuda"] if torch.cuda.is_available() else [])),
        "operations": [dataclasses.asdict(row) for row in kernels_report()],
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _setting() -> str:
    """The environment variables that decide."""
    said = [
        f"{name}={os.environ[name]}"
        for name in ("MOEMB_KERNELS", "LOCAL_KERNELS", "MOEMB_CPU_ISA")
        if name in os.environ
    ]
    return ", ".join(said) or "auto"


def _staged() -> list[dict[str, Any]]:
    """What `make install` left in this environment."""
    from modeling_moemb.kernel_sources_moemb import STAGED, metadata_files, staged_status

    rows = []
    for folder in sorted(STAGED.glob("*/")):
        variants = [_variant(file.parent) for file in metadata_files(folder)]
        state, message = staged_status(folder.name)
        rows.append({"repository": folder.name, "state": state, "message": message, "variants": variants})
    return rows


def _variant(folder: Path) -> dict[str, Any]:
    """Name, version and digest of one variant folder."""
    from modeling_moemb.kernel_sources_moemb import check_digest

    row = {"variant": folder.name, "folder": str(folder), "version": None, "id": None}
    try:
        read = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        row.update(version=read["version"], id=read["id"])
        row["digest"] = "valid" if check_digest(folder) else "none"
    except Exception as error:  # whatever is wrong with it is what the row says
        row["digest"] = " ".join(str(error).split())
    return row


def _loaded(devices: list[str]) -> list[dict[str, Any]]:
    """The repositories as the model sees them."""
    from modeling_moemb.kernels_moemb import kernel_sources

    rows = []
    for device in devices:
        for source in kernel_sources(device):
            row = {"repository": source.repository, "device": device, "broken": source.broken, "why": source.why}
            if source.module is not None:
                row.update(_variant(Path(source.module.__file__).parent))
                isa = getattr(source.module, "isa", None)
                row["isa"] = isa() if isa is not None else None
            rows.append(row)
    return rows


def as_text(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [
        ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + f", {report['threads']} threads",
        f"kernels: {report['setting']}",
        "",
    ]
    for row in report["loaded"]:
        lines.append(f"{row['repository']} for {row['device']}: {row['why']}")
        if "variant" in row:
            isa = f", instructions {row['isa']}" if row["isa"] else ""
            lines.append(f"  version {row['version']}, {row['id']}{isa}, digest {row['digest']}, {row['variant']}")
    for row in report["staged"]:
        if row["state"] != "ok":
            lines.append(f"{row['repository']} could not be staged ({row['state']}):")
            lines += [f"  {line}" for line in row["message"].splitlines()]
    operations = report["operations"]
    said = {row["why"] for row in report["loaded"]}
    shown = []
    for row in operations:
        why = "" if row["dtypes"] else "see above" if row["why"] in said else row["why"]
        shown.append((row["op"], row["device"], row["source"], ", ".join(row["dtypes"]), why))
    lines += ["", *_table(("operation", "device", "runs on", "dtypes", "why not"), shown)]
    active = sum(bool(row["dtypes"]) for row in operations)
    lines += ["", f"{active} of {len(operations)} operations run on kernels, the others on PyTorch."]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths)] + [row[-1]]).rstrip()
        for row in [head, *rows]
    ]

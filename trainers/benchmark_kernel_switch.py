"""The model's kernels as a benchmark sees them: found by operation, switched off to time the torch path."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modeling_moemb.kernels_moemb import kernels_report, use_kernels


@contextmanager
def kernels_off() -> Iterator[None]:
    """Runs a block on the model's own torch code."""
    before = use_kernels("off")
    try:
        yield
    finally:
        use_kernels(before)


def active_kernels() -> list[dict[str, Any]]:
    """What runs each operation, and why, as plain data; a record travels, so it names no folder of this machine."""
    names = {sys.prefix: "ENVIRONMENT", str(Path.cwd()): ".", str(Path.home()): "~"}
    rows = [asdict(row) for row in kernels_report()]
    for row in rows:
        for folder, name in names.items():
            row["why"] = row["why"].replace(folder, name)
    return rows


def any_kernel(device: str = "cpu") -> bool:
    """Whether some operation runs on a kernel rather than on torch code."""
    return any(row.source != "torch" for row in kernels_report() if row.device == device)

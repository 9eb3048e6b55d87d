"""Runs a conversion in a forked child that is killed at a chosen point: no handler and no cleanup runs."""

import os
import signal
from collections.abc import Callable

from moemb.trainers import convert_safetensors, convert_work


def die(*_, **__):
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(point: str, die_among_files: Callable[[], None]) -> None:
    """Change the modules of this process so that it dies at `point`."""
    if point.isdigit():
        convert_safetensors.BLOCK_BYTES = 4096
        real, written = convert_safetensors._copy, []

        def copy_then_die(segment, out, on_bytes):
            real(segment, out, on_bytes)
            written.append(segment.num_bytes)
            if sum(written) > int(point):
                out.flush()
                die()

        convert_safetensors._copy = copy_then_die
    elif point == "files":
        die_among_files()
    else:
        rename = os.rename
        convert_work.os.rename = die if point == "before the rename" else lambda *paths: (rename(*paths), die())


def run_killed(point: str, call: Callable[[], object], die_among_files: Callable[[], None]) -> None:
    """Run `call` in a child that dies at `point`.

    Args:
        point (`str`): a number of bytes of weights, `files` (among the other files), `before the rename` or
            `after the rename`.
        call (`Callable`): the conversion.
        die_among_files (`Callable`): changes the modules of the child so that it dies among the other files.
    """
    child = os.fork()
    if child == 0:
        try:
            _arrange(point, die_among_files)
            call()
        finally:
            os._exit(1)  # it outlived its death, or failed: never let the child return into pytest
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the child ended with status {status}"

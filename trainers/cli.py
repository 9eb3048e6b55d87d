"""The `moemb` command: one verb per module of this room.

A verb's module offers `HELP` (one line, a plain string), `add_arguments(parser)` and `run(args) -> int`. It is
imported only when its verb is called, and the help lines are read from the source text: `moemb --help` never waits
for torch. A module that sets `ACCEPTS_OVERRIDES = True` receives unknown `--key value` pairs as `args.overrides`, for
a recipe.
"""

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import MoEMBError, nearest


VERBS = {
    "data": "corpus_command",
    "train": "train",
    "plan": "plan",
    "evaluate": "evaluation",
    "bench": "benchmark",
    "convert": "convert",
    "merge": "merge",
    "prune-experts": "prune_experts",
    "calibrate": "calibration",
    "analyze": "analyze",
    "ablate": "ablate",
    "study": "study",
    "encode": "encode",
    "serving": "serving",
    "publish": "publish",
    "kernels": "kernels",
    "quickstart": "quickstart",
    "app": "app",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest flag instead of listing the whole usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\nSee '{self.prog} --help'.\n")


def help_line(verb: str) -> str:
    """Return the one-line help of a verb, read from its module's source without importing it."""
    source = (Path(__file__).parent / f"{VERBS[verb]}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "HELP" for t in node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"the module of the verb '{verb}' has no HELP line")


def usage() -> str:
    """Return the text of `moemb --help`: every verb with one line."""
    width = max(map(len, VERBS)) + 2
    lines = [f"  {verb:<{width}}{help_line(verb)}" for verb in VERBS]
    return "\n".join(
        [
            "usage: moemb VERB [--flags]",
            "",
            "MoEMB: a sparse mixture-of-experts multimodal embedder with a compute dial.",
            "",
            *lines,
            "",
            "'moemb VERB --help' lists the flags of a verb; 'moemb --version' prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv (`Sequence[str]`, *optional*, defaults to the process' arguments): verb and flags.

    Returns:
        `int`: the exit status: 0 when the verb did its work, 2 for a mistake in the call, 1 for one the verb reports.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"moemb {version('moemb')}")
        return 0
    verb = argv[0]
    if verb not in VERBS:
        print(f"moemb: error: there is no verb '{verb}'{nearest(verb, VERBS)}\n\n{usage()}", file=sys.stderr)
        return 2
    return _run_verb(verb, argv[1:])


def _run_verb(verb: str, flags: list[str]) -> int:
    module = importlib.import_module(f".{VERBS[verb]}", __package__)
    parser = _Parser(prog=f"moemb {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    takes_overrides = getattr(module, "ACCEPTS_OVERRIDES", False)
    if not takes_overrides:
        _refuse_unknown(parser, [flag for flag in flags if flag.startswith("--") and len(flag) > 2])
    args, extra = parser.parse_known_args(flags)
    if takes_overrides:
        args.overrides = extra
    else:
        _refuse_unknown(parser, extra)
    try:
        return int(module.run(args) or 0)
    except MoEMBError as error:
        if os.environ.get("MOEMB_TRACEBACK"):
            raise
        print(f"moemb {verb}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nmoemb {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (for example `| head`): stop without a second error at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if os.environ.get("MOEMB_TRACEBACK"):
            raise
        print(f"moemb {verb}: error: {_describe(error)}", file=sys.stderr)
        return 1


def _describe(error: OSError) -> str:
    """What the system refused and for which path, on one line."""
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    if paths and error.strerror:
        return f"{' -> '.join(paths)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _refuse_unknown(parser: _Parser, words: list[str]) -> None:
    """Name the first word that is no flag of the verb. Called before parsing too: a mistyped required flag would
    otherwise be reported as a missing one."""
    known = [option for action in parser._actions for option in action.option_strings]
    for word in words:
        flag = word.partition("=")[0]
        if flag not in known:
            what = "flag" if flag.startswith("-") else "argument"
            parser.error(f"unknown {what} '{flag}'{nearest(flag, known)}")


if __name__ == "__main__":
    sys.exit(main())

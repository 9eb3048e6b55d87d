"""`moemb bench`: kernels, encoding and training against named peers, correctness first; or the compute dial."""

import argparse
import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import write_atomically


HELP = "measure kernels, encoding, training or the compute dial against named peers in the same run"
ACCEPTS_OVERRIDES = True  # keys of the recipe, with --config alone

DEFAULT_OUTPUT = "results/bench"
SUITES = {
    "kernels": "benchmark_kernels",
    "encode": "benchmark_encode",
    "train": "benchmark_train",
    "contrastive": "benchmark_contrastive",
    "rollouts": "benchmark_rollouts",
    "app": "benchmark_app",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite, the cases, the timing and the output."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", choices=SUITES, help="what to measure against transformers")
    what.add_argument(
        "--config", type=Path, metavar="FILE", help="measure compute policies: recipe, recipes/moemb-mini/bench.yaml"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="only cases or policies whose name is or starts with NAME (--list shows them)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the cases or policies and measure nothing"
    )
    parser.add_argument("--output", metavar="DIR", help=f"folder of the results (the recipe's, else {DEFAULT_OUTPUT})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all works, measures nothing")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds that count (7; 2 with --quick)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of all peers (as torch chooses)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="wall time, or CPU time of one thread, which other processes disturb less (needs --threads 1)",
    )
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to SECONDS per case for rounds in which other processes leave the machine alone",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has measured")
    parser.add_argument("--no-plots", action="store_true", help="write no PNG files")
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        help="the Python of an environment with vLLM, or 'none' (~/.cache/moemb/vllm-venv/bin/python if it is there)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, writes `<output>/<suite or recipe>.json`, `.md` and `.png`, prints a table.

    Status 1: a case failed or is wrong.
    """
    import importlib

    config = None
    if args.config is not None:
        from .benchmark_dial_config import DialBenchConfig
        from .recipe import load_recipe

        (config,) = load_recipe(args.config, DialBenchConfig, overrides=args.overrides)
        suite, every = None, list(config.policies)
    else:
        _refuse_overrides(args.overrides)
        suite = importlib.import_module(f".{SUITES[args.suite]}", __package__)
        every = suite.case_names(args.quick)
    names = _chosen(every, args.only)
    if args.list:
        print("\n".join(names))
        return 0
    _check(args)
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # stock code says at every start that it is slow here: that is what we measure
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    from .benchmark_report import figure

    output = Path(args.output or (config and config.output) or DEFAULT_OUTPUT).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    if not args.no_plots:
        figure(1)  # says now, not after an hour, that plots are not possible
    if config is None:
        return _measure(args, suite, names, output)
    from .benchmark_dial import run_config

    return run_config(config.chosen(names), args.config.stem, output, _protocol(args), args)


def _refuse_overrides(words: list[str]) -> None:
    """A suite has no recipe whose keys a flag could set."""
    from .benchmark_report import BenchmarkError

    if words:
        raise BenchmarkError(f"unknown argument '{words[0]}'; keys of a recipe go with --config, see --help")


def _chosen(names: list[str], only: list[str] | None) -> list[str]:
    """The cases to run, in their own order."""
    from .benchmark_report import BenchmarkError
    from .errors import nearest

    if not only:
        return names
    for word in only:
        if not any(name.startswith(word) for name in names):
            known = [*dict.fromkeys(name.split("-")[0] for name in names), *names]
            raise BenchmarkError(f"nothing is named or starts with '{word}'{nearest(word, known)}; see --list")
    # a full name means that case alone, though longer names may begin with it
    return [name for name in names if name in only or any(name.startswith(w) for w in only if w not in names)]


def _check(args: argparse.Namespace) -> None:
    from .benchmark_report import BenchmarkError

    for flag, low in (("rounds", 1), ("threads", 1), ("wait_quiet", 0)):
        value = getattr(args, flag)
        if value is not None and not value >= low:
            raise BenchmarkError(f"--{flag.replace('_', '-')} must be at least {low}, got {value}")
    if args.clock == "cpu" and args.threads != 1:
        raise BenchmarkError("--clock cpu counts the time of one thread: add --threads 1")
    if args.vllm not in (None, "none") and not Path(args.vllm).expanduser().is_file():
        raise BenchmarkError(f"--vllm {args.vllm}: there is no such file; give a Python interpreter, or 'none'")


def _vllm_python(given: str | None) -> Path | None:
    from .benchmark_vllm_peer import DEFAULT_PYTHON

    if given == "none":
        return None
    if given is not None:
        return Path(given).expanduser()
    return DEFAULT_PYTHON if DEFAULT_PYTHON.is_file() else None


def _protocol(args: argparse.Namespace):
    from .benchmark_timing import Protocol

    rounds = args.rounds if args.rounds is not None else 2 if args.quick else 7
    return Protocol(
        rounds=rounds,
        clock=args.clock,
        wait_quiet=args.wait_quiet,
        shortest=1e-4 if args.quick else 0.02,
    )


def _measure(args: argparse.Namespace, suite, names: list[str], output: Path) -> int:
    from dataclasses import asdict

    import torch
    from tqdm.auto import tqdm

    from .benchmark_kernel_switch import active_kernels
    from .benchmark_machine import machine
    from .benchmark_report import CaseStore, code_fingerprint

    facts, kernels, protocol = machine(), active_kernels(), _protocol(args)
    vllm = _vllm_python(args.vllm)
    conditions = {
        "code": code_fingerprint(), "kernels": kernels, "protocol": asdict(protocol), "quick": args.quick,
        "threads": torch.get_num_threads(), "processor": facts["processor"], "versions": facts["versions"],
    }  # fmt: skip
    store = CaseStore(output, args.suite, conditions)
    runner = _runner(args, suite, protocol, vllm)
    with tqdm(names, unit="case", disable=None) as bar:
        for name in bar:
            if args.fresh or store.get(name) is None:
                store.put(name, _run_case(runner, name, lambda text, name=name: _tell(bar, name, text)))
    # with --only, what earlier runs measured under these conditions stays in the report
    every = ((name, store.get(name, failed=name in names)) for name in suite.case_names(args.quick))
    records = [record for _, record in every if record is not None]
    return _finish(args, suite, records, output, {"machine": facts, "kernels": kernels, "protocol": asdict(protocol)})


def _runner(args: argparse.Namespace, suite, protocol, vllm: Path | None) -> Callable[[str, Callable], dict[str, Any]]:
    """A function that runs one case of the suite."""
    if args.suite == "kernels":
        return lambda name, progress: suite.run_case(name, protocol, args.quick, progress)
    from .benchmark_encode import Context

    return lambda name, progress: suite.CASES[name](Context(protocol, args.quick, progress, vllm))


def _tell(bar, name: str, text: str) -> None:
    bar.set_description_str(f"{name}: {text}"[:90])


def _run_case(runner, name: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """One case; what goes wrong in it is its result and does not end the others."""
    import os

    from .errors import MoEMBError

    start = time.monotonic()
    try:
        result = runner(name, progress)
    except (MoEMBError, RuntimeError, ValueError, MemoryError, NotImplementedError) as error:
        if os.environ.get("MOEMB_TRACEBACK"):
            raise
        result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    return {**result, "case_seconds": time.monotonic() - start}


def _finish(args: argparse.Namespace, suite, records: list[dict[str, Any]], output: Path, facts: dict) -> int:
    from .benchmark_report import markdown, table

    good = [record for record in records if "failed" not in record]
    path = output / f"{args.suite}.json"
    command = shlex.join(["moemb", *sys.argv[1:]])
    report = {"suite": args.suite, "command": command, "arguments": vars(args), **facts, "cases": records}
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    if good:
        print(table(suite.rows(good)))
        write_atomically(path.with_suffix(".md"), markdown(report, inspect.getdoc(suite), suite.rows(good)))
    if good and not args.no_plots:
        suite.plot(good, path.with_suffix(".png"))
    wrong = [record for record in good if record.get("check", {}).get("wrong")]
    missed = sum(not goal["met"] for record in good for goal in record["goals"])
    for record in records:
        if "failed" in record:
            print(f"{record['case']} failed: {record['failed']}", file=sys.stderr)
    for record in wrong:
        print(f"{record['case']}: {', '.join(record['check']['wrong'])} computes wrong results", file=sys.stderr)
    plotted = " and .png" if good and not args.no_plots else ""
    files = f"{path}, .md{plotted}" if good else path
    print(
        f"{len(good)} of {len(records)} cases measured, {missed} goals missed"
        f"{' (sizes of --quick say nothing about goals)' if args.quick else ''}; {files}",
        file=sys.stderr,
    )
    return int(bool(wrong) or len(good) < len(records))

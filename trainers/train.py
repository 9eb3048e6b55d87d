"""`moemb train`: runs the training that a recipe describes."""

import argparse
import ctypes
import os
import platform
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

from .errors import MoEMBError
from .files import held


HELP = "train as a recipe says: contrastive, adaptive, grpo; pretrain and mini-contrastive for moemb-mini"
ACCEPTS_OVERRIDES = True

METHODS = ("contrastive", "pretrain", "mini-contrastive", "adaptive", "grpo")


class TrainError(MoEMBError, ValueError):
    """A training that cannot start; the text names the value and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`; every key of the recipe can also be given as `--key value`."""
    parser.add_argument(
        "--config",
        required=True,
        help="the recipe, such as recipes/moemb-mini/pretrain.yaml",
    )
    parser.add_argument(
        "--publish",
        metavar="DIR",
        help="train nothing: copy the run's best checkpoint, log and commands to DIR, such as "
        "recipes/moemb-mini/checkpoint",
    )


def run(args: argparse.Namespace) -> int:
    """Trains as `args.config` says and writes `final/` when the run is complete. Returns the exit status."""
    from .recipe import parse_overrides, read_recipe

    method = {**read_recipe(args.config), **parse_overrides(args.overrides)}.get("method")
    if method not in METHODS:
        raise TrainError(f"{args.config}: method is {method!r}; write one of 'method: {' | '.join(METHODS)}'")
    keep_freed_memory()
    if method in ("adaptive", "grpo"):
        return run_adaptive(args) if method == "adaptive" else run_grpo(args)
    return run_contrastive(args) if method == "contrastive" else run_mini(args, method)


def settings_of(args: argparse.Namespace, *classes: type) -> tuple:
    """The recipe's settings, one object for each class; the first one's `output_dir` is spelled out."""
    from .recipe import load_recipe

    settings = load_recipe(args.config, *classes, overrides=args.overrides, extra_keys=("method",))
    settings[0].output_dir = os.path.expanduser(os.path.expandvars(settings[0].output_dir))
    return settings


def refuse_publishing(args: argparse.Namespace) -> None:
    """Raises `TrainError` when `--publish` was given to a method whose runs end in a repository."""
    if args.publish:
        raise TrainError("--publish is for moemb-mini's own checkpoint; final/ of this method is a repository already")


def run_contrastive(args: argparse.Namespace) -> int:
    """Contrastive training of any model on any data."""
    from .contrastive_config import ContrastiveConfig
    from .contrastive_trainer import build_trainer
    from .router_settings import RouterSettings

    refuse_publishing(args)
    return run_trainer(build_trainer(*settings_of(args, ContrastiveConfig, RouterSettings)), args)


def run_adaptive(args: argparse.Namespace) -> int:
    """Gates trained by gradients."""
    from .adaptive_config import AdaptiveConfig
    from .adaptive_trainer import build_trainer

    refuse_publishing(args)
    return run_trainer(build_trainer(*settings_of(args, AdaptiveConfig)), args)


def run_grpo(args: argparse.Namespace) -> int:
    """Gates trained by policy optimisation."""
    from .grpo_run import GRPORunConfig, build_trainer

    refuse_publishing(args)
    return run_trainer(build_trainer(*settings_of(args, GRPORunConfig)), args)


def run_mini(args: argparse.Namespace, method: str) -> int:
    """The two stages of moemb-mini, on its corpus."""
    from .checkpoint import publish
    from .corpus import load_corpus

    if method == "pretrain":
        from .pretrain_config import PretrainConfig as config_class
        from .pretrain_trainer import build_trainer
    else:
        from .mini_contrastive_config import MiniContrastiveConfig as config_class
        from .mini_contrastive_trainer import build_trainer
    (config,) = settings_of(args, config_class)
    if config.init_from:
        config.init_from = os.path.expanduser(os.path.expandvars(config.init_from))
    if args.publish:
        folder = publish(config.output_dir, args.publish)
        print(f"published: {folder}", file=sys.stderr)
        print(f"learning curve: {write_results(folder, args)}", file=sys.stderr)
        return 0
    return run_trainer(build_trainer(config, load_corpus(config.corpus)), args)


def write_results(checkpoint: Path, args: argparse.Namespace) -> Path:
    """Writes the learning curve of a checkpoint into `results/` in it, or beside it when it is called `checkpoint`."""
    from .learning_curve import write_curve

    folder = (checkpoint.parent if checkpoint.name == "checkpoint" else checkpoint) / "results"
    command = shlex.join(["moemb", "train", "--config", args.config, "--publish", args.publish])
    return write_curve(checkpoint / "log.jsonl", folder, command, "moemb-mini")


def run_trainer(trainer, args: argparse.Namespace) -> int:
    """Trains, going on from the newest whole checkpoint, and writes the weights."""
    from .checkpoint import record_command
    from .packed_trainer import newest_checkpoint

    config = trainer.args
    folder = Path(config.output_dir)
    busy = TrainError(f"another training writes to {folder}: wait until it has ended, or choose another output_dir")
    with held(folder, busy) if trainer.is_world_process_zero() else nullcontext():
        if trainer.is_world_process_zero():
            record_command(config.output_dir, ["moemb", "train", "--config", args.config, *args.overrides])
        if config.max_steps:
            with config.main_process_first(local=False, desc="looking for checkpoints"):
                checkpoint = newest_checkpoint(config.output_dir) if config.continue_run else None
            if checkpoint is not None:
                print(f"going on from {checkpoint}", file=sys.stderr)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        print(f"weights: {trainer.export_final()}", file=sys.stderr)
    return 0


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of up to 32 MB blocks for the next tensor instead of giving it back to the system.

    Without it every activation is fresh memory that the kernel must clear page by page: a fifth of a step on the CPU.
    """
    if platform.system() != "Linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    libc.mallopt(mmap_threshold, 32 << 20)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 256 << 20)

"""`moemb plan`: how much memory the training of a recipe takes on each device, for several numbers of devices.

Nothing of the model is loaded: its architecture is counted, and what activations take is measured on two or three
blocks of its width.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import MoEMBError


if TYPE_CHECKING:
    from modeling_moemb import MoEMBConfig

    from .contrastive_config import ContrastiveConfig
    from .plan_memory import Layout


HELP = "print how much memory the training of a recipe takes per device, for several numbers of devices"
ACCEPTS_OVERRIDES = True

ARCHITECTURE = "architecture.yaml"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
_ONE_MACHINE = 8  # devices of a machine: experts shared out among more would send tokens over the network
_USABLE = 0.92  # the rest is the device's context and gaps between tensors
HEAD = ("devices", "spread by", "weights", "gathered", "gradients", "optimizer", "activations", "negatives", "peak")


class PlanError(MoEMBError, ValueError):
    """A plan that cannot be made; the text names what is missing or wrong and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb; every key of the recipe can also be given as `--key value`."""
    parser.add_argument("--config", required=True, help="a recipe with method: contrastive")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=None, help="numbers of devices; powers of 2 up to 64"
    )
    parser.add_argument("--device-memory", type=float, default=80.0, metavar="GIB", help="of one device; 80")
    parser.add_argument("--ep-size", type=int, help="devices that share out the experts; as many as 8, if they can")
    parser.add_argument(
        "--architecture",
        metavar="FILE",
        help="config.json of the model, or a YAML of its settings; found in the model's folder or beside the recipe",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan there, in bytes")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status."""
    from .files import write_atomically

    report = make_plan(args)
    print(table(report))
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(args.json), json.dumps(report, indent=2) + "\n")
        print(f"written: {args.json}", file=sys.stderr)
    return 0


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """
    The plan of a recipe.

    Args:
        args (`argparse.Namespace`): The flags.

    Returns:
        `dict`: `recipe`, `architecture`, `model` (numbers of weights), `device_memory` and `rows`: devices, kind,
        bytes of each part and of the peak, and whether that fits.

    Raises:
        PlanError: a flag, or an architecture that cannot be found.
    """
    from .plan_activations import measure_chunk_memory
    from .plan_memory import model_sizes, plan_memory

    if args.device_memory <= 0:
        raise PlanError(f"--device-memory {args.device_memory:g}: it is the GiB of a device, such as 80")
    settings, on_cpu = read_settings(args.config, args.overrides)
    source, config = read_architecture(args, settings)
    layouts = list(plan_layouts(args, settings, config))
    sizes = model_sizes(config, settings)
    chunk = measure_chunk_memory(config, settings, kernels=on_cpu)
    limit = args.device_memory * 2**30
    rows = []
    for layout in layouts:
        plan = plan_memory(sizes, chunk, settings, layout)
        fits = plan["peak"] <= _USABLE * limit
        rows.append(
            {"devices": layout.processes, "kind": layout.kind, "ep_size": layout.ep_size, **plan, "fits": fits}
        )
    return {
        "recipe": str(args.config),
        "architecture": source,
        "model": {"weights": sizes.total, "routed_experts": sizes.experts, "trained": sizes.trained},
        "batch_size": settings.batch_size,
        "mini_batch_tokens": settings.mini_batch_tokens,
        "device_memory": limit,
        "rows": rows,
        "refused": refusal(settings),
    }


def read_settings(path: str, overrides: Sequence[str]) -> tuple["ContrastiveConfig", bool]:
    """The recipe's settings as one process sees them, and whether it is for the CPU."""
    from .contrastive_config import ContrastiveConfig
    from .recipe import load_recipe, parse_overrides, read_recipe
    from .router_settings import RouterSettings

    values = {**read_recipe(path), **parse_overrides(overrides)}
    if values.get("method") != "contrastive":
        raise PlanError(f"{path}: method is {values.get('method')!r}; a plan is made for 'method: contrastive'")
    here = ["--use_cpu", "true", "--distributed", "null", "--report_to", "none"]
    settings, _ = load_recipe(
        path, ContrastiveConfig, RouterSettings, overrides=[*overrides, *here], extra_keys=("method",)
    )
    return settings, str(values.get("use_cpu", False)).lower() == "true"


def read_architecture(args: argparse.Namespace, settings: "ContrastiveConfig") -> tuple[str, "MoEMBConfig"]:
    """Where the model's architecture was found, and that architecture."""
    from huggingface_hub.errors import StrictDataclassError

    from modeling_moemb import MoEMBConfig

    from .quickstart_model import MINI, mini_repository
    from .recipe import read_recipe

    folder = mini_repository() if settings.model == MINI else Path(settings.model).expanduser()
    beside = Path(args.config).parent / ARCHITECTURE
    tried = [Path(args.architecture)] if args.architecture else [folder / "config.json", beside]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise PlanError(
            f"the architecture of '{settings.model}' is not at {' or '.join(map(str, tried))}: name the config.json "
            "of the model, or a YAML of its settings, with --architecture"
        )
    try:
        values = json.loads(found.read_text(encoding="utf-8")) if found.suffix == ".json" else read_recipe(found)
        values = {
            key: value for key, value in values.items() if key not in ("model_type", "architectures", "auto_map")
        }
        config = MoEMBConfig.from_dict(values)
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise PlanError(
            f"{found} is not the configuration of a MoEMB or Qwen3.5-MoE model: {' '.join(str(error).split())}"
        ) from error
    if config.emb_token_id is None:  # a stock configuration; any row of the table may become that of <emb>
        config.emb_token_id = config.text_config.vocab_size - 1
    return str(found), config


def plan_layouts(args: argparse.Namespace, settings: "ContrastiveConfig", config: "MoEMBConfig") -> Iterator["Layout"]:
    """The ways to spread the training that are possible, for each number of devices."""
    from .plan_memory import Layout

    experts = config.text_config.num_experts if config.feed_forward == "moe" else 0
    for count in args.devices or DEVICES:
        if count < 1 or settings.batch_size % count:
            if args.devices is None:
                continue
            raise PlanError(f"--devices {count}: batch_size={settings.batch_size} must be a multiple of it")
        yield Layout(count, "ddp")
        if count == 1 or refusal(settings):
            continue
        yield Layout(count, "fsdp2")
        sizes = [size for size in range(2, _ONE_MACHINE + 1) if not count % size and experts and not experts % size]
        if args.ep_size is not None:
            sizes = [args.ep_size] if not count % args.ep_size and experts and not experts % args.ep_size else []
        if sizes:
            yield Layout(count, "fsdp2+ep", max(sizes))


def refusal(settings: "ContrastiveConfig") -> str | None:
    """Why the weights of this training cannot be spread; `None` when they can."""
    if settings.tuning == "lora" and settings.lora_expert_rank:
        return f"lora_expert_rank={settings.lora_expert_rank}: adapters of routed experts need whole weights, so DDP"
    if settings.train_vision:
        return "train_vision: a trained vision tower needs whole weights, so DDP"
    return None


def table(report: dict[str, Any]) -> str:
    """The plan as text, in GiB per device."""
    from .plan_memory import describe, gibibytes

    rows = [(*HEAD, "fits")]
    for row in report["rows"]:
        kind = f"fsdp2, ep {row['ep_size']}" if row["kind"] == "fsdp2+ep" else row["kind"]
        rows.append((str(row["devices"]), kind, *describe(row), "yes" if row["fits"] else "no"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) + 1)]
    model = report["model"]
    lines = [
        f"{report['recipe']}: {model['weights'] / 1e9:.2f} billion weights ({report['architecture']}), "
        f"{model['trained'] / 1e6:.1f} million trained, batch {report['batch_size']}, "
        f"{report['mini_batch_tokens']} tokens at once",
        f"GiB per device of {gibibytes(report['device_memory'])}; a peak up to {100 * _USABLE:.0f} % of that fits",
        "",
    ]
    for row in rows:
        cells = [f"{row[0]:>{widths[0]}}", f"{row[1]:<{widths[1]}}"]
        lines.append("  ".join(cells + [f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:])]))
    lines += [
        "",
        "peak: the most that is there at once; activations, negatives and the optimizer's step take turns.",
        "activations: of one chunk, measured on the CPU on blocks of this width.",
    ]
    if report["refused"]:
        lines.append(f"Only DDP: {report['refused']}.")
    return "\n".join(lines)

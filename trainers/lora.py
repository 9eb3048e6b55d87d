"""What of a model is trained: LoRA adapters through PEFT, or the weights themselves; counted, printed and asserted.

`target_modules` alone would leave the routed experts out without a word: they are parameters, not modules, and get
their adapters through `target_parameters`, with a rank of their own. Adapter folders name no folder of the machine
they were made on.
"""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from modeling_moemb.linear_moemb import use_packed_linear

from .contrastive_config import ContrastiveConfig
from .distributed import gather_adapters, whole_modules
from .errors import MoEMBError


ADAPTER = "default"
_LAYERS = r".*language_model\.layers\.\d+\."
# Dense blocks have no shared expert; their feed-forward layer stands in its place.
TARGETS = {
    "attention": r"self_attn\.(q_proj|k_proj|v_proj|o_proj)",
    "gated_delta": r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)",
    "shared_expert": r"mlp\.(shared_expert\.)?(gate_proj|up_proj|down_proj)",
}
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER_MODULES = ("mlp.gate", "mlp.shared_expert_gate")
CONDITIONING_MODULES = ("task_router", "task_conditioning")
# The first pattern found in a parameter's name says what it belongs to.
COMPONENTS = (
    ("vision tower", r"(^|\.)visual\."),
    ("task conditioning", r"\.?(task_router|task_conditioning)\."),
    ("gates", r"(^|\.)gates\."),
    ("embeddings", r"embed_tokens"),
    ("routed experts", r"\.mlp\.experts\."),
    ("router", r"\.mlp\.(gate|shared_expert_gate)\."),
    ("norms", r"norm"),
    ("convolutions", r"\.conv1d\."),
    ("decay and write strength", r"\.linear_attn\.(A_log|dt_bias|in_proj_a|in_proj_b)"),
    ("gated delta", r"\.linear_attn\."),
    ("attention", r"\.self_attn\."),
    ("shared expert", r"\.mlp\.(shared_expert\.)?(gate_proj|up_proj|down_proj)"),
)


class TrainableError(MoEMBError, RuntimeError):
    """The parameters that would be trained are not those that were asked for; the text names the difference."""


@dataclass(frozen=True)
class Count:
    """Parameters of a component: all, trained, and trained in adapters."""

    total: int = 0
    trained: int = 0
    adapters: int = 0


def component(name: str) -> str:
    """What a parameter belongs to, by its name."""
    return next((label for label, pattern in COMPONENTS if re.search(pattern, name)), "other")


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return ".lora_" in name or "trainable_tokens_" in name


def prepare_trainable(model: nn.Module, args: ContrastiveConfig) -> None:
    """
    Makes trainable what the settings ask for, and freezes the rest.

    Args:
        model (`MoEMBModel`): The model; LoRA adds adapters to it, in place, by the generator of torch.
        args (`ContrastiveConfig`): The settings.

    Raises:
        TrainableError: when the model then trains anything else.
    """
    model.requires_grad_(False)
    if args.tuning == "lora":
        config = lora_config(model, args)
        with _quiet_about_parameters(), whole_modules(model, config.modules_to_save or ()):
            model.add_adapter(config, ADAPTER)
        use_packed_adapters(model)
        gather_adapters(model, adapter_names(model))
    else:
        for name, parameter in model.named_parameters():
            frozen = {"vision tower": not args.train_vision, "router": not args.train_router}
            parameter.requires_grad_(not frozen.get(component(name), False))
    check_trainable(model, args)


def use_packed_adapters(model: nn.Module) -> None:
    """
    Lets LoRA's products run on the kernel that the layers beside them run on, in place.

    torch compiles a bfloat16 product on the CPU anew for every number of rows and keeps what it compiled: with ragged
    chunks time and memory would grow with their number.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            use_packed_linear(module)


@contextmanager
def _quiet_about_parameters() -> Iterator[None]:
    """PEFT takes the ranks of `target_parameters` and then warns that no *module* has their names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield


def lora_config(model: nn.Module, args: ContrastiveConfig) -> Any:
    """PEFT's configuration of the settings.

    Args:
        model (`MoEMBModel`): The model without adapters.
        args (`ContrastiveConfig`): The settings.
    """
    from peft import LoraConfig

    names = [name for name, _ in model.named_modules()]
    saved = [end for end in CONDITIONING_MODULES if any(name.endswith(end) for name in names)]
    if args.train_router:
        saved += [end for end in ROUTER_MODULES if any(name.endswith(f".{end}") for name in names)]
    experts = [end for end in EXPERT_PARAMETERS if args.lora_expert_rank]
    alpha = args.lora_alpha * args.lora_expert_rank / args.lora_rank
    targets = "|".join(TARGETS[name] for name in args.lora_targets)
    return LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=0.0,
        target_modules=f"{_LAYERS}({targets})" if targets else [],
        target_parameters=experts or None,
        rank_pattern={re.escape(name): args.lora_expert_rank for name in experts},
        alpha_pattern={re.escape(name): alpha for name in experts},
        trainable_token_indices={"embed_tokens": [model.config.emb_token_id]} if args.train_emb_token else None,
        modules_to_save=saved or None,
    )


def expected_trainable(model: nn.Module, args: ContrastiveConfig) -> dict[str, int]:
    """How many parameters of each component the settings train, found from the shapes of the frozen weights alone."""
    expected: dict[str, int] = {}

    def add(label: str, count: int) -> None:
        if count:
            expected[label] = expected.get(label, 0) + count

    for name, parameter in model.named_parameters():
        if is_adapter(name) or ".modules_to_save." in name:
            continue
        plain = re.sub(r"\.(base_layer|original_module|token_adapter)\b", "", name)
        label, size = component(plain), parameter.numel()
        if args.tuning == "full":
            frozen = {"vision tower": not args.train_vision, "router": not args.train_router}
            add(label, 0 if frozen.get(label, False) else size)
        elif any(re.fullmatch(rf"{_LAYERS}{TARGETS[target]}\.weight", plain) for target in args.lora_targets):
            add(label, args.lora_rank * sum(parameter.shape))
        elif plain.endswith(EXPERT_PARAMETERS) and args.lora_expert_rank:
            add(label, parameter.shape[0] * args.lora_expert_rank * sum(parameter.shape[1:]))
        elif label == "embeddings" and args.train_emb_token:
            add(label, parameter.shape[1])
        elif label == "task conditioning" or (label == "router" and args.train_router):
            add(label, size)
    return expected


def count_parameters(model: nn.Module) -> dict[str, Count]:
    """Parameters of each component; adapters are counted as trained and not in the total of the weights."""
    counts: dict[str, Count] = {}
    for name, parameter in model.named_parameters():
        plain = re.sub(r"\.(base_layer|original_module|token_adapter|modules_to_save\.\w+)\b", "", name)
        label, size = component(plain), parameter.numel()
        extra = is_adapter(name) or ".modules_to_save." in name
        old, trained = counts.get(label, Count()), size if parameter.requires_grad else 0
        counts[label] = Count(
            old.total + (0 if extra else size), old.trained + trained, old.adapters + (trained if extra else 0)
        )
    return counts


def check_trainable(model: nn.Module, args: ContrastiveConfig) -> None:
    """
    Compares what would be trained with what the settings ask for.

    Raises:
        TrainableError: names each component that differs.
    """
    expected = expected_trainable(model, args)
    actual = {label: count.trained for label, count in count_parameters(model).items() if count.trained}
    if actual == expected:
        return
    differing = [
        f"{label}: {actual.get(label, 0):,} instead of {expected.get(label, 0):,}"
        for label in sorted({*actual, *expected})
        if actual.get(label, 0) != expected.get(label, 0)
    ]
    raise TrainableError(
        f"the parameters that would be trained are not those of tuning={args.tuning!r} with lora_targets="
        f"{args.lora_targets} ({'; '.join(differing)}): the model's layers have other names, or a library changed"
    )


def trainable_table(model: nn.Module) -> str:
    """What is trained, by component, as text."""
    counts = count_parameters(model)
    rows = [("component", "weights", "trained", "of it in adapters")]
    rows += [(label, f"{c.total:,}", f"{c.trained:,}", f"{c.adapters:,}") for label, c in sorted(counts.items())]
    sums = [sum(getattr(count, name) for count in counts.values()) for name in ("total", "trained", "adapters")]
    rows.append(("all", *(f"{number:,}" for number in sums)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{row[0]:<{widths[0]}}" + "".join(f"  {row[c]:>{widths[c]}}" for c in (1, 2, 3)) for row in rows]
    return "\n".join([*lines, f"trained: {100 * sums[1] / max(1, sums[0]):.2f} % of the number of weights"])


def adapter_names(model: nn.Module) -> list[str]:
    """The parameters of a model's adapters, and of its modules that are trained beside them."""
    return [name for name, _ in model.named_parameters() if is_adapter(name) or ".modules_to_save." in name]


def save_adapter(model: nn.Module, folder: Path, base: str) -> None:
    """
    Writes the adapter in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        model (`MoEMBModel`): The model with the adapter; its other weights may be spread over processes.
        folder (`Path`): Where to; made when it is not there.
        base (`str`): What the model was loaded from. Of a folder only the name is written.
    """
    from safetensors.torch import save_file

    # `save_pretrained` would gather all weights of a model that is spread over processes
    state = {name: model.get_parameter(name).detach() for name in adapter_names(model)}
    weights = model.get_adapter_state_dict(ADAPTER, state_dict=state)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(folder)
    named = {f"base_model.model.{name}": value.contiguous() for name, value in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = portable_name(base)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def portable_name(base: str) -> str:
    """A model's name without folders of this machine: Hub ids stay, of a folder its last part does."""
    path = Path(base).expanduser()
    return path.resolve().name if path.is_dir() or path.is_absolute() else base


def load_adapter_weights(model: nn.Module, folder: Path) -> None:
    """
    Puts the weights of a saved adapter into the adapter that the model has.

    Raises:
        TrainableError: when they are not those of this adapter.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = {
        name.removeprefix("base_model.model."): value
        for name, value in load_file(Path(folder) / "adapter_model.safetensors").items()
    }
    result = set_peft_model_state_dict(model, weights, adapter_name=ADAPTER)
    missing = [name for name in result.missing_keys if is_adapter(name)]
    if missing or result.unexpected_keys:
        raise TrainableError(
            f"the adapter in {folder} does not fit: it lacks {_few(missing)} and holds {_few(result.unexpected_keys)} "
            "besides; was it trained with other LoRA settings?"
        )


def _few(names: Sequence[str]) -> str:
    return f"{len(names)} weights" + (f" ({names[0]}, ...)" if names else "")


def merged_model(base: Path, adapter: Path, task_conditioning: dict | None = None) -> nn.Module:
    """
    The base model with an adapter merged into its weights, in the dtype they are stored in, on the CPU.

    Args:
        base (`Path`): Folder of the model that the adapter was trained on.
        adapter (`Path`): Folder of the adapter.
        task_conditioning (`dict`, *optional*): What the routers were given in training, if the base has it not.

    Returns:
        `MoEMBModel`: without adapters.
    """
    from peft import PeftModel

    from modeling_moemb import MoEMBModel

    model = MoEMBModel.from_pretrained(str(base), dtype="auto")
    if task_conditioning is not None and model.config.task_conditioning is None:
        model.add_task_conditioning(task_conditioning)
    with _quiet_about_parameters():
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()

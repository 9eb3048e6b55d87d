"""Model cards from facts: the configuration, the parameter counts of the model it describes, and evaluation files.

No figure is typed by hand. What has not been measured is said to be so.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from .model_card_results import NOT_EVALUATED, evaluation_part, read_json


TEMPLATE = Path(__file__).with_name("model_card_template.md")
TAGS = ["sentence-transformers", "feature-extraction", "sentence-similarity", "multimodal", "mixture-of-experts"]
LIMITS = (
    "A vector says how alike two items are, not whether either is true or safe.",
    "Similarity carries over the biases of the training data; test on your own items before you rely on a ranking.",
    "Text beyond the token budget is cut at its end; images, frames and the `<emb>` token are never cut.",
)
UNTRAINED_EMB = (
    "The `<emb>` token is freshly initialised: this repository is a starting point for contrastive training, and its "
    "vectors are not yet useful for retrieval."
)


def count_parameters(config) -> dict[str, int]:
    """Count the parameters of the model that a configuration describes, without allocating them.

    Args:
        config (`Qwen3_5MoeConfig` or `Qwen3_5Config`): `MoEMBConfig` or a stock class.

    Returns:
        `dict[str, int]`: `total`; `active`, what one text token multiplies with: the decoder with
        `num_experts_per_tok` of the routed experts, without the embedding table (a look-up) and the vision tower;
        `routed_experts`; `vision`; `embedding_table`.
    """
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(config))  # a model writes into the configuration it is built from
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    vision = sum(size for name, size in sizes.items() if name.startswith("visual."))
    table = sum(size for name, size in sizes.items() if ".embed_tokens." in name)
    total = sum(sizes.values())
    text = config.text_config
    active = total - vision - table - routed
    active += routed * text.num_experts_per_tok // text.num_experts if routed else 0
    return {"total": total, "active": active, "routed_experts": routed, "vision": vision, "embedding_table": table}


def card_text(
    config,
    *,
    name: str,
    base_model: str | None = None,
    license: str | None = None,
    description: str = "",
    evaluation: Path | None = None,
    limits: Sequence[str] = (),
    trained: bool = False,
    header: Mapping[str, Any] | None = None,
    results: Sequence[str] = (),
    parts: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Write the README of a model repository.

    Args:
        config (`MoEMBConfig` or `Qwen3_5MoeConfig`): configuration; the stock class makes the card of a plain
            repository, which loads without remote code.
        name (`str`): how the repository is called, and loaded in the snippets.
        base_model (`str`, *optional*): Hub id or name that the weights come from.
        license (`str`, *optional*): identifier such as `apache-2.0`; left out when unknown.
        description (`str`, *optional*): what is particular about this model, one paragraph.
        evaluation (`Path`, *optional*): JSON file of `moemb evaluate`; without one the card says that none was run.
        limits (`Sequence[str]`, *optional*): further limits, a sentence each.
        trained (`bool`, *optional*, defaults to `False`): whether the `<emb>` token was trained contrastively.
        header (`Mapping`, *optional*): further metadata of the YAML header, such as `model-index`.
        results (`Sequence[str]`, *optional*): lines of the evaluation section that follow, or stand in the place of,
            those of `evaluation`.
        parts (`Mapping[str, Sequence[str]]`, *optional*): further sections, lines by heading, before the limits.

    Returns:
        `str`: Markdown with a YAML header.
    """
    plain = config.model_type != "moemb"
    # The stock model has no pooler: the template ends in <emb>, so its state is the last attended one.
    pooled = "last_hidden_state` of the last token, `<emb>" if plain else "pooler_output"
    sentences = [*([] if trained else [UNTRAINED_EMB]), *LIMITS, *limits]
    default = "A sparse mixture-of-experts embedder: any mix of text, images and video in, one vector out."
    measured = evaluation_part(read_json(evaluation)) if evaluation is not None else []
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=_metadata(base_model, license, header or {}),
        name=name,
        description=description or default,
        architecture="\n".join(f"| {key} | {value} |" for key, value in _architecture(config)),
        trust="" if plain else ", trust_remote_code=True",
        trust_note="" if plain else " with `trust_remote_code=True`",
        pooled=pooled,
        conventions=_conventions(config),
        evaluation="\n".join([*measured, *results] or [NOT_EVALUATED]),
        parts="".join(f"## {heading}\n\n" + "\n".join(lines) + "\n\n" for heading, lines in (parts or {}).items()),
        limits="\n".join(f"- {sentence}" for sentence in sentences),
    )


def license_of(folder: Path) -> str | None:
    """Return the licence that the README of a checkpoint folder declares in its YAML header, if any."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        header = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError):
        return None
    declared = header.get("license") if isinstance(header, dict) else None
    return declared if isinstance(declared, str) else None


def _metadata(base_model: str | None, license: str | None, further: Mapping[str, Any]) -> str:
    header: dict[str, Any] = {"library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity"}
    header["tags"] = [*TAGS, *(tag for tag in further.get("tags", ()) if tag not in TAGS)]
    if license:
        header["license"] = license
    if base_model:
        header["base_model"] = base_model
    header |= {key: value for key, value in further.items() if key != "tags"}
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip()


def _architecture(config) -> list[tuple[str, str]]:
    text, vision, sizes = config.text_config, config.vision_config, count_parameters(config)
    kinds = list(text.layer_types)
    mixers = f"{kinds.count('linear_attention')} Gated DeltaNet, {kinds.count('full_attention')} full attention"
    kind = getattr(config, "feed_forward", "moe") if hasattr(text, "num_experts") else "dense"
    if kind == "moe":
        shared = "1 shared" if text.shared_expert_intermediate_size else "none shared"
        experts = f"{text.num_experts} routed, {text.num_experts_per_tok} per token, and {shared}, in every block"
    else:
        experts = {"modality": "1 each for text, image and video tokens, in every block", "dense": "none"}[kind]
    return [
        ("parameters", f"{human(sizes['total'])} in all"),
        ("active per text token", f"{human(sizes['active'])} (embedding table and vision tower not counted)"),
        ("in routed experts", human(sizes["routed_experts"])),
        ("embedding dimension", str(text.hidden_size)),
        ("blocks", f"{text.num_hidden_layers}: {mixers}"),
        ("experts", experts),
        (
            "vision tower",
            f"{vision.depth} blocks, {human(sizes['vision'])} parameters, patches of {vision.patch_size}",
        ),
        ("vocabulary", f"{text.vocab_size} rows"),
        ("modalities", "text, image, video, and mixes of them in order"),
    ]


def _conventions(config) -> str:
    settings = getattr(config, "embedding", None) or {}
    layout = (
        "The item is laid out by the chat template of this repository, which ends in `<emb>`; the state of that token "
        "is the embedding."
    )
    if not settings:
        return layout
    rows = [f"- `{key}`: `{json.dumps(value, ensure_ascii=False)}`" for key, value in settings.items()]
    return "\n".join([f"{layout} Recorded with the model, so that every route gives the same vector:", "", *rows])


def human(count: int) -> str:
    """Return a count with three significant digits: `12.3 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)

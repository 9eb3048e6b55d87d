"""The settings of the compute dial: what `adaptive_compute` may hold, checked when it is set or loaded."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any


MODALITY_NAMES = ("text", "image", "video")
VISUAL_NAMES = ("image", "video")
PRUNING_SCORES = ("beta", "attention", "random", "uniform", "gate")
PRUNING_SCOPES = ("item", "image")
# the kind of block that a score is read from
SCORE_BLOCKS = {"beta": "linear_attention", "attention": "full_attention"}

KEYS = (
    "top_k",
    "random_k",
    "per_modality",
    "tiered_top_k",
    "modes",
    "token_pruning",
    "expert_skip",
    "null_experts",
    "gradual_pruning",
    "seed",
)
MODES_KEYS = ("layer_scales", "tau", "min_experts", "min_experts_emb", "renormalise")
PRUNING_KEYS = ("layer", "keep", "budget", "threshold", "modalities", "scope", "score")
TIER_KEYS = ("layer", "min")
SKIP_KEYS = ("threshold", "scale_kept", "temperature")
NULL_KEYS = ()
GRADUAL_KEYS = ("threshold", "halting")
GATE_KEYS = {
    "keep": ("layer", "width"),
    "gradual": ("blocks",),
    "skip": ("blocks", "router_top1"),
    "null": ("blocks", "experts"),
}
# the parts of a budget that are decided by a gate, besides `token_pruning` with the score "gate"
GATED = {"expert_skip": "skip", "null_experts": "null", "gradual_pruning": "gradual"}


def validate_adaptive_compute(
    settings: dict[str, Any] | None, text_config: Any, gates: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Check a compute budget and return a copy of it, so that a typo never silently means "full compute".

    All parts compose. Expert policies apply in the order of this list, each to the pairs the ones before left.

    Args:
        settings (`dict`, *optional*): `None` or `{}` means full compute. Keys, all optional:

            - `expert_skip` (`dict`): tokens whose skip gate is above `threshold` (a probability, by default 0.5) run
              no routed experts; `<emb>` always does in the last block. `scale_kept` (by default `False`): the others'
              experts are weighted by the probability of not skipping, at the gate's `temperature` (by default 1).
            - `null_experts` (`dict`, empty): a token's top-k is taken over routed and null experts together; `<emb>`
              keeps all its experts in the last block.
            - `top_k` (`int`): routed experts per token, from 1 to the checkpoint's `num_experts_per_tok`; the kept
              routing weights are renormalised.
            - `per_modality` (`dict`): the same for `"text"`, `"image"` and `"video"` tokens; stands over `top_k`.
            - `tiered_top_k` (`dict`): after decoder block `layer`, tokens get between `min` and their own number of
              experts by the rank of their beta among the item's live tokens of their modality; `<emb>` keeps its own.
            - `random_k` (`int`): a control: so many of each token's chosen experts, drawn at random, renormalised.
            - `modes` (`dict`): skip the experts whose weight times the layer's scale is below a threshold (MoDES,
              arXiv 2511.15690). `tau` (a number of at least 0, or one per modality, absent ones 0), `layer_scales`
              (one number of at least 0 per decoder block, or such a list for each of the three modalities; by
              default `1 / num_hidden_layers`), `min_experts` (by default 0) and `min_experts_emb` (for `<emb>`; by
              default 1): how many of a token's heaviest experts are never skipped, `renormalise` (by default
              `False`): whether the kept weights are scaled to sum to 1.
            - `token_pruning` (`dict`): drop image and video tokens after decoder block `layer` (the number of blocks
              that see all tokens). Either `keep` (a fraction, above 0 and at most 1) or `budget` (a number of tokens,
              at least 1), each also as one per modality, absent ones whole; `modalities` (by default
              `["image", "video"]`); `scope`: `"item"` ranks all images of an item together, and all video frames,
              `"image"` ranks inside each image and frame and leaves each at least one token; `score`: `"beta"`,
              `"gate"` (the model's keep gate, at its own block), or the controls `"attention"` (mean attention
              received), `"random"`, `"uniform"` (every n-th token). With the gate also, in place of `keep` or
              `budget`, a `threshold` (a probability of being kept, below 1): of each item all tokens above it stay,
              and at least the best one.
            - `gradual_pruning` (`dict`): before each block that has a gradual gate, drop the image and video tokens
              whose probability of being dropped there is above `threshold` (by default 0.5); or, with `halting` (above
              0 and below 1), those whose probabilities up to there add up to more than 1 - `halting` (A-ViT, arXiv
              2112.07658).
            - `seed` (`int`, by default 0): another draw of what is random.
        text_config (`Qwen3_5MoeTextConfig`): the decoder's configuration, which bounds the values.
        gates (`dict`, *optional*): the model's gates, see [`validate_gates`].

    Raises:
        TypeError: if `settings` is not a mapping.
        ValueError: for an unknown key or a value out of range; names the key, the value and what is allowed.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise TypeError(f"`adaptive_compute` must be a dict or None, got {type(settings).__name__}: {settings!r}")
    _check_keys(settings, "", KEYS)
    settings = {key: copy.deepcopy(value) for key, value in settings.items() if value is not None}
    most, blocks = text_config.num_experts_per_tok, text_config.num_hidden_layers

    def experts(value: Any, name: str) -> None:
        _check_integer(value, name, 1, most, " (the checkpoint's experts per token)")

    for key in ("top_k", "random_k"):
        if key in settings:
            experts(settings[key], f"['{key}']")
    if "per_modality" in settings:
        _check_mapping(settings["per_modality"], "['per_modality']", MODALITY_NAMES)
        _check_each(settings["per_modality"], "['per_modality']", experts)
    if "tiered_top_k" in settings:
        tier = settings["tiered_top_k"]
        _check_mapping(tier, "['tiered_top_k']", TIER_KEYS, required=TIER_KEYS)
        experts(tier["min"], "['tiered_top_k']['min']")
        _check_layer(tier["layer"], "['tiered_top_k']['layer']", text_config, "beta")
    if "modes" in settings:
        _check_modes(settings["modes"], most, blocks)
    if "token_pruning" in settings:
        _check_pruning(settings["token_pruning"], text_config, gates or {})
    _check_gated(settings, gates or {})
    if "seed" in settings:
        _check_integer(settings["seed"], "['seed']", 0, 2**31 - 1)
    return settings


def _check_modes(modes: Any, most: int, blocks: int) -> None:
    name = "['modes']"
    _check_mapping(modes, name, MODES_KEYS, required=("tau",))
    _check_one_or_each(modes["tau"], f"{name}['tau']", MODALITY_NAMES, _check_not_negative)
    scales = modes.get("layer_scales")
    if scales is not None:
        by_modality = isinstance(scales, dict)
        if by_modality:
            _check_mapping(scales, f"{name}['layer_scales']", MODALITY_NAMES, required=MODALITY_NAMES)
        for key, values in scales.items() if by_modality else [(None, scales)]:
            where = f"{name}['layer_scales']" + (f"['{key}']" if by_modality else "")
            if not isinstance(values, (list, tuple)) or len(values) != blocks:
                _refuse(where, f"a list of {blocks} numbers, one for each decoder block", values)
            for index, value in enumerate(values):
                _check_not_negative(value, f"{where}[{index}]")
    for key in ("min_experts", "min_experts_emb"):
        if key in modes:
            _check_integer(modes[key], f"{name}['{key}']", 0, most, " (the checkpoint's experts per token)")
    if not isinstance(modes.get("renormalise", False), bool):
        _refuse(f"{name}['renormalise']", "true or false", modes["renormalise"])


def _check_pruning(pruning: Any, text_config: Any, gates: dict[str, Any]) -> None:
    name = "['token_pruning']"
    _check_mapping(pruning, name, PRUNING_KEYS, required=("layer",))
    score, scope = pruning.get("score", "beta"), pruning.get("scope", "item")
    if score not in PRUNING_SCORES:
        _refuse(f"{name}['score']", f"one of {list(PRUNING_SCORES)}", score)
    if scope not in PRUNING_SCOPES:
        _refuse(f"{name}['scope']", f"one of {list(PRUNING_SCOPES)}", scope)
    _check_layer(pruning["layer"], f"{name}['layer']", text_config, score)
    if score == "gate":
        _check_gate("keep", f"{name}['score']", gates)
        if pruning["layer"] != gates["keep"]["layer"]:
            _refuse(f"{name}['layer']", f"{gates['keep']['layer']}, where the keep gate stands", pruning["layer"])
    keys = [key for key in ("keep", "budget", "threshold") if key in pruning]
    if len(keys) != 1 or (keys == ["threshold"] and score != "gate"):
        gated = ", or with the score 'gate' a 'threshold' (a probability)"
        _refuse(name, f"given exactly one of 'keep' (a fraction) and 'budget' (a number of tokens){gated}", pruning)
    key = keys[0]
    check = {"keep": _check_fraction, "budget": _check_budget, "threshold": _check_probability}[key]
    _check_one_or_each(pruning[key], f"{name}['{key}']", VISUAL_NAMES, check)
    modalities = pruning.get("modalities")
    if modalities is None:
        return
    if isinstance(pruning[key], dict):
        _refuse(f"{name}['modalities']", f"left out when '{key}' names the modalities", modalities)
    if not isinstance(modalities, (list, tuple)) or not modalities or any(m not in VISUAL_NAMES for m in modalities):
        _refuse(f"{name}['modalities']", f"a list of {' and '.join(map(repr, VISUAL_NAMES))}", modalities)


def _check_gated(settings: dict[str, Any], gates: dict[str, Any]) -> None:
    """The parts of a budget that need a gate of their own."""
    if "expert_skip" in settings:
        skip, name = settings["expert_skip"], "['expert_skip']"
        _check_mapping(skip, name, SKIP_KEYS)
        _check_gate("skip", name, gates)
        _check_probability(skip.get("threshold", 0.5), f"{name}['threshold']")
        if not isinstance(skip.get("scale_kept", False), bool):
            _refuse(f"{name}['scale_kept']", "true or false", skip["scale_kept"])
        if not _is_number(skip.get("temperature", 1.0)) or skip.get("temperature", 1.0) <= 0:
            _refuse(f"{name}['temperature']", "a finite number above 0", skip["temperature"])
    if "null_experts" in settings:
        null, name = settings["null_experts"], "['null_experts']"
        _check_mapping(null, name, NULL_KEYS)
        _check_gate("null", name, gates)
    if "gradual_pruning" in settings:
        gradual, name = settings["gradual_pruning"], "['gradual_pruning']"
        _check_mapping(gradual, name, GRADUAL_KEYS)
        _check_gate("gradual", name, gates)
        if len(gradual) > 1:
            _refuse(name, "given at most one of 'threshold' and 'halting'", gradual)
        for key, value in gradual.items():
            _check_probability(value, f"{name}['{key}']")


def _check_gate(kind: str, name: str, gates: dict[str, Any]) -> None:
    if kind not in gates:
        raise ValueError(
            f"`adaptive_compute{name}` needs a {kind!r} gate, but this model has {sorted(gates) or 'none'}: train one "
            "(`moemb train`, method: adaptive or grpo), or add an untrained one with `attach_gates`"
        )


def validate_gates(gates: dict[str, Any] | None, text_config: Any) -> dict[str, Any] | None:
    """Check which gates a model has and return a copy with all defaults filled in.

    Args:
        gates (`dict`, *optional*): `None` or `{}` for none. Keys, all optional, each with a mapping (`{}` for the
            defaults): `keep`: `layer` (blocks that see all tokens, by default 4), `width` (of the gate, by default
            256); `gradual`: `blocks` (a list: the blocks before which tokens may be dropped, by default all but the
            first); `skip`: `blocks` (by default all), `router_top1` (by default `False`: whether the gate sees a
            token's largest routing weight); `null`: `blocks` (by default all), `experts` (null experts per block, by
            default twice the routed ones).
        text_config (`Qwen3_5MoeTextConfig`): the decoder's configuration.

    Raises:
        ValueError: for an unknown key or a value out of range; names the key, the value and what is allowed.
    """
    if not gates:
        return None
    where, blocks = "`gates`", text_config.num_hidden_layers
    if isinstance(gates, dict):
        gates = {
            "null" if kind is None else kind: gate for kind, gate in gates.items()
        }  # YAML's reading of a bare null
    if not isinstance(gates, dict) or set(gates) - set(GATE_KEYS):
        raise ValueError(f"{where} must be a dict with keys among {list(GATE_KEYS)}, got {gates!r}")
    checked: dict[str, Any] = {}
    for kind, known in GATE_KEYS.items():
        if kind not in gates:
            continue
        given = gates[kind] or {}
        if not isinstance(given, dict) or set(given) - set(known):
            raise ValueError(f"{where}[{kind!r}] must be a dict with keys among {list(known)}, got {given!r}")
        first = 1 if kind == "gradual" else 0
        defaults = {
            "layer": min(4, blocks - 1),
            "width": 256,
            "blocks": list(range(first, blocks)),
            "router_top1": False,
            "experts": 2 * text_config.num_experts,
        }
        gate = {key: defaults[key] if given.get(key) is None else given[key] for key in known}
        for key, (low, high) in {"layer": (1, blocks - 1), "width": (1, 2**20), "experts": (1, 2**20)}.items():
            value = gate.get(key, low)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{where}[{kind!r}][{key!r}] must be an integer from {low} to {high}, got {value!r}")
        if "blocks" in gate:
            given, allowed = gate["blocks"], range(first, blocks)
            if not isinstance(given, (list, tuple)) or not given or any(block not in allowed for block in given):
                raise ValueError(
                    f"{where}[{kind!r}]['blocks'] must be a list of {first} to {blocks - 1}, got {given!r}"
                )
            gate["blocks"] = sorted({int(block) for block in given})
        if not isinstance(gate.get("router_top1", False), bool):
            raise ValueError(f"{where}['skip']['router_top1'] must be true or false, got {gate['router_top1']!r}")
        checked[kind] = gate
    return checked


def active_gates(budget: dict[str, Any]) -> list[str]:
    """The kinds of gates that a validated compute budget puts to work."""
    kinds = [kind for key, kind in GATED.items() if budget.get(key) is not None]
    if (budget.get("token_pruning") or {}).get("score") == "gate":
        kinds.append("keep")
    return [kind for kind in GATE_KEYS if kind in kinds]


def without_gates(settings: dict[str, Any] | None, kinds: Sequence[str]) -> dict[str, Any] | None:
    """A compute budget without the parts that need gates of these kinds."""
    left = dict(settings or {})
    if (left.get("token_pruning") or {}).get("score") == "gate" and "keep" in kinds:
        del left["token_pruning"]
    for key, kind in GATED.items():
        if kind in kinds:
            left.pop(key, None)
    return left or None


def _check_layer(layer: Any, name: str, text_config: Any, score: str) -> None:
    """A decision after `layer` blocks: there must be a block left to save, and one to read the score from."""
    blocks = text_config.num_hidden_layers
    _check_integer(layer, name, 1, blocks - 1, f" (the decoder has {blocks} blocks, at least one must follow)")
    kind = SCORE_BLOCKS.get(score)
    if kind is not None and kind not in text_config.layer_types[:layer]:
        if kind not in text_config.layer_types[: blocks - 1]:
            _refuse(name, f"after a {kind} block to read the score {score!r} from, but there is none", layer)
        first = text_config.layer_types.index(kind) + 1
        _refuse(name, f"from {first} to {blocks - 1}: the score {score!r} is read from {kind} blocks", layer)


def _check_one_or_each(value: Any, name: str, kinds: Sequence[str], check: Callable[[Any, str], None]) -> None:
    """One value for all modalities, or a mapping from their names."""
    if isinstance(value, dict):
        _check_mapping(value, name, kinds)
        _check_each(value, name, check)
    else:
        check(value, name)


def _check_each(values: dict, name: str, check: Callable[[Any, str], None]) -> None:
    for key, value in values.items():
        check(value, f"{name}['{key}']")


def _check_mapping(value: Any, name: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
    if not isinstance(value, dict):
        _refuse(name, f"a dict with keys among {list(known)}", value)
    _check_keys(value, name, known)
    missing = [key for key in required if value.get(key) is None]
    if missing:
        raise ValueError(f"`adaptive_compute{name}` lacks {missing}")


def _check_keys(value: dict, name: str, known: Sequence[str]) -> None:
    unknown = sorted(set(map(str, value)) - set(known))
    if unknown:
        raise ValueError(f"unknown `adaptive_compute{name}` keys {unknown}; known keys: {list(known)}")


def _check_integer(value: Any, name: str, low: int, high: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(name, f"an integer from {low} to {high}{why}", value)


def _check_budget(value: Any, name: str) -> None:
    _check_integer(value, name, 1, 2**31 - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_not_negative(value: Any, name: str) -> None:
    if not _is_number(value) or value < 0:
        _refuse(name, "a finite number of at least 0", value)


def _check_probability(value: Any, name: str) -> None:
    if not _is_number(value) or not 0 < value < 1:
        _refuse(name, "a number above 0 and below 1", value)


def _check_fraction(value: Any, name: str) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        _refuse(name, "a number above 0 and at most 1", value)


def _refuse(name: str, allowed: str, value: Any) -> None:
    raise ValueError(f"`adaptive_compute{name}` must be {allowed}, got {value!r}")


__all__ = ["active_gates", "validate_adaptive_compute", "validate_gates", "without_gates"]

"""The designs of a converted model: native experts, or a dense Qwen3.5 upcycled, by modality, or as it is.

Upcycling cuts the network of every block, of width F, into G shards of width F / G and copies them R times, which
makes E = G R experts: expert `j = r G + g` holds rows `g F/G .. (g + 1) F/G` of `gate` and `up` and those columns of
`down`. The router gets R random rows, each G times ("virtual groups", He et al., arXiv 2410.07524), so that a token's
top k, a multiple of G, are whole groups. Qwen3.5 normalises the chosen weights to sum to 1 and they are equal inside a
group, hence a shard counts 1/G of what it should: `down` times G makes the model equal to the dense one, for every
token. The scaling is exact in bf16 when G is a power of 2.

Departure from Megatron's upcycling, which spreads the factor over `gate`, `up` and `down` (its cube root each): SiLU
is not homogeneous, and that model is not the dense one.

What breaks the symmetry of the copies is training, or by choice noise on all weights or a share of each expert's
channels drawn anew (Drop-Upcycling, arXiv 2502.19261); the model is then near the dense one, not equal.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from .convert_safetensors import (
    ConversionError,
    PlannedTensor,
    Segment,
    StoredTensor,
    column_blocks,
    decode,
    encode,
    row_blocks,
    rows,
    some,
    whole,
)


DESIGNS = ("native", "upcycled", "modality", "dense")
MODALITIES = 3  # text, image, video
_DENSE = re.compile(r"^language_model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight$")
_MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Design:
    """How the feed-forward networks of the new model are made.

    Args:
        kind (`str`, *optional*, defaults to `"native"`): `"native"` keeps the experts of a mixture-of-experts
            checkpoint; the others start from a dense one: `"upcycled"`, `"modality"` (a copy each for text, image and
            video tokens), `"dense"`.
        granularity (`int`, *optional*, defaults to 8): G, the shards that a network is cut into.
        replicas (`int`, *optional*, defaults to 4): R, the copies of each shard.
        top_k (`int`, *optional*): experts per token, a multiple of G; G when `None`, which computes as much as the
            dense model.
        router_std (`float`, *optional*, defaults to 0.02): standard deviation of the router's rows.
        noise (`float`, *optional*, defaults to 0.0): noise on each expert's weights, relative to the standard
            deviation of the matrix they come from.
        reinit (`float`, *optional*, defaults to 0.0): share of each expert's channels that is drawn anew from a normal
            distribution with the mean and standard deviation of the matrix.
        seed (`int`, *optional*, defaults to 0): of all these draws.
    """

    kind: str = "native"
    granularity: int = 8
    replicas: int = 4
    top_k: int | None = None
    router_std: float = 0.02
    noise: float = 0.0
    reinit: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.kind not in DESIGNS:
            raise ConversionError(f"--design is {self.kind!r}, but must be one of {', '.join(DESIGNS)}")
        for name, flag in (("granularity", "--granularity"), ("replicas", "--replicas")):
            if getattr(self, name) < 1:
                raise ConversionError(f"{flag} is {getattr(self, name)}, but must be 1 or more")
        if self.experts_per_token % self.granularity or not 1 <= self.experts_per_token <= self.experts:
            raise ConversionError(
                f"--top-k is {self.top_k}, but must be a multiple of --granularity {self.granularity} up to "
                f"{self.experts}: a token's experts are whole groups"
            )
        for name, flag in (("router_std", "--router-std"), ("noise", "--noise")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConversionError(f"{flag} is {getattr(self, name)}, but must be finite and 0 or more")
        if not self.router_std and self.replicas > 1 and self.kind == "upcycled":
            raise ConversionError("--router-std is 0: all experts would tie; choose a value above 0, such as 0.02")
        if not 0 <= self.reinit <= 1:
            raise ConversionError(f"--reinit is {self.reinit}, but must be a share from 0 to 1")
        if self.seed < 0:
            raise ConversionError(f"--design-seed is {self.seed}, but must be 0 or more")

    @property
    def experts(self) -> int:
        return self.granularity * self.replicas

    @property
    def experts_per_token(self) -> int:
        return self.granularity if self.top_k is None else self.top_k

    @property
    def exact(self) -> bool:
        """Whether the new model equals the dense one."""
        return not (self.noise or self.reinit)


def moemb_settings(settings: Mapping, design: Design) -> dict:
    """The `config.json` of a checkpoint as one of a MoEMB model of the design, before its vocabulary is known.

    Args:
        settings (`Mapping`): of a stock checkpoint, or of a dense MoEMB repository.
        design (`Design`): the design.

    Raises:
        ConversionError: a width that cannot be cut as the design says.
    """
    settings = json.loads(json.dumps(settings))
    text = settings["text_config"]
    for unused in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        text.pop(unused, None)
    if design.kind != "native":
        width = dense_width(settings)
        text.pop("intermediate_size", None)
        if design.kind == "upcycled":
            if width % design.granularity:
                raise ConversionError(
                    f"--granularity is {design.granularity}, but must divide the width of the dense network, {width}"
                )
            experts = (design.experts, design.experts_per_token, width // design.granularity)
        else:
            experts = (MODALITIES if design.kind == "modality" else 1, 1, width)
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        text |= dict(zip(names, experts, strict=True)) | {"shared_expert_intermediate_size": 0}
        text["model_type"] = "qwen3_5_moe_text"
        settings["vision_config"]["model_type"] = "qwen3_5_moe_vision"
        settings["feed_forward"] = "moe" if design.kind == "upcycled" else design.kind
        settings["adaptive_compute"] = None  # a budget was calibrated for another model
    return settings | {"model_type": "moemb", "architectures": ["MoEMBModel"]}


def dense_width(settings: Mapping) -> int:
    """Width of the networks of a dense checkpoint."""
    text = settings["text_config"]
    return text["moe_intermediate_size" if settings.get("model_type") == "moemb" else "intermediate_size"]


def plan_feed_forward(tensors: Mapping[str, StoredTensor], design: Design) -> list[PlannedTensor]:
    """Plan the tensors of a dense checkpoint for a design; only the feed-forward networks change.

    Args:
        tensors (`Mapping[str, StoredTensor]`): base-model keys.
        design (`Design`): not native.

    Raises:
        ConversionError: a block that lacks a matrix, or whose matrices do not fit each other.
    """
    if design.kind == "dense":
        return [PlannedTensor(key, tensor.dtype, tensor.shape, (whole(tensor),)) for key, tensor in tensors.items()]
    planned, networks = [], {}
    for key, tensor in tensors.items():
        match = _DENSE.match(key)
        if match:
            networks.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            planned.append(PlannedTensor(key, tensor.dtype, tensor.shape, (whole(tensor),)))
    if not networks:
        raise ConversionError("the checkpoint has no dense networks ('mlp.gate_proj.weight' of its layers)")
    for layer, network in networks.items():
        prefix = f"language_model.layers.{layer}.mlp"
        _check_network(prefix, network)
        plan = _plan_modality if design.kind == "modality" else _plan_upcycled
        planned += plan(prefix, layer, *(network[name] for name in _MATRICES), design)
    return planned


def _check_network(prefix: str, network: Mapping[str, StoredTensor]) -> None:
    missing = [f"{prefix}.{name}.weight" for name in _MATRICES if name not in network]
    if missing:
        raise ConversionError(f"{len(missing)} keys are missing: {some(missing)}")
    gate, up, down = (network[name] for name in _MATRICES)
    if len(gate.shape) != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
        raise ConversionError(
            f"the matrices of '{prefix}' are {gate.shape}, {up.shape} and {down.shape}; gate and up must be alike, "
            "and down their transpose"
        )
    if len({gate.dtype, up.dtype, down.dtype}) > 1:
        raise ConversionError(f"the matrices of '{prefix}' are of the types {gate.dtype}, {up.dtype}, {down.dtype}")


def _plan_modality(prefix, layer, gate, up, down, design) -> list[PlannedTensor]:
    width, hidden = gate.shape
    return [
        PlannedTensor(
            f"{prefix}.experts.gate_up_proj", gate.dtype, (MODALITIES, 2 * width, hidden),
            (whole(gate), whole(up)) * MODALITIES,
        ),
        PlannedTensor(
            f"{prefix}.experts.down_proj", down.dtype, (MODALITIES, hidden, width), (whole(down),) * MODALITIES
        ),
    ]  # fmt: skip


def _plan_upcycled(prefix, layer, gate, up, down, design: Design) -> list[PlannedTensor]:
    width, hidden = gate.shape
    if width % design.granularity:
        raise ConversionError(
            f"--granularity is {design.granularity}, but must divide the width of '{prefix}', {width}"
        )
    size = width // design.granularity
    gate_up, downs = [], []
    for expert in range(design.experts):
        start = expert % design.granularity * size
        change = _Change(design, layer, expert, size)
        for number, matrix in enumerate((gate, up)):
            if design.exact:
                gate_up.append(rows(matrix, start, start + size))
            else:
                blocks = partial(change.rows, matrix, number, start)
                gate_up.append(Segment(size * matrix.row_bytes, blocks=blocks))
        num_bytes = down.num_bytes // design.granularity
        downs.append(Segment(num_bytes, blocks=partial(change.columns, down, 2, start)))
    rng = np.random.default_rng([design.seed, layer, _ROUTER])
    groups = rng.standard_normal((design.replicas, hidden)) * design.router_std
    router = encode(groups.repeat(design.granularity, axis=0), gate.dtype)
    count = design.experts
    return [
        PlannedTensor(f"{prefix}.gate.weight", gate.dtype, (count, hidden), (Segment(len(router), literal=router),)),
        PlannedTensor(f"{prefix}.experts.gate_up_proj", gate.dtype, (count, 2 * size, hidden), tuple(gate_up)),
        PlannedTensor(f"{prefix}.experts.down_proj", down.dtype, (count, hidden, size), tuple(downs)),
    ]


# streams of random numbers: (seed, layer, _ROUTER) and (seed, layer, _EXPERT, expert, purpose)
_ROUTER, _EXPERT = 0, 1
_CHANNELS = 9


@dataclass(frozen=True)
class _Change:
    """What becomes of the weights of one expert; blocks are made anew whenever they are asked for."""

    design: Design
    layer: int
    expert: int
    size: int

    def rows(self, matrix: StoredTensor, number: int, start: int) -> Iterator[bytes]:
        """Blocks of the expert's rows of `gate` or `up`."""
        mean, std = moments(matrix)
        noise, anew = self._rng(number), self._rng(number, 3)
        chosen, place = self._channels(), 0
        for block in row_blocks(matrix, start, start + self.size):
            values = decode(block, matrix.dtype).reshape(-1, matrix.shape[1]).copy()
            if self.design.noise:
                values += self.design.noise * std * noise.standard_normal(values.shape, np.float32)
            here = np.flatnonzero(chosen[place : place + len(values)])
            values[here] = mean + std * anew.standard_normal((len(here), values.shape[1]), np.float32)
            place += len(values)
            yield encode(values, matrix.dtype)

    def columns(self, matrix: StoredTensor, number: int, start: int) -> Iterator[bytes]:
        """Blocks of the expert's columns of `down`, times G."""
        mean, std = (0.0, 0.0) if self.design.exact else moments(matrix)
        noise, anew = self._rng(number), self._rng(number, 3)
        chosen = np.flatnonzero(self._channels())
        for block in column_blocks(matrix, start, start + self.size):
            values = decode(block, matrix.dtype).reshape(-1, self.size).copy()
            if self.design.noise:
                values += self.design.noise * std * noise.standard_normal(values.shape, np.float32)
            if len(chosen):
                values[:, chosen] = mean + std * anew.standard_normal((len(values), len(chosen)), np.float32)
            yield encode(values * self.design.granularity, matrix.dtype)

    def _channels(self) -> np.ndarray:
        """Which of the expert's channels are drawn anew, bool `(size,)`; the same in its three matrices."""
        chosen = np.zeros(self.size, dtype=bool)
        count = int(self.design.reinit * self.size)
        chosen[self._rng(_CHANNELS).choice(self.size, count, replace=False)] = True
        return chosen

    def _rng(self, number: int, offset: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.design.seed, self.layer, _EXPERT, self.expert, number + offset])


@lru_cache(maxsize=16)
def moments(tensor: StoredTensor) -> tuple[float, float]:
    """Mean and standard deviation of a stored matrix, block by block."""
    total = squares = 0.0
    for block in row_blocks(tensor, 0, tensor.shape[0]):
        values = decode(block, tensor.dtype).astype(np.float64)
        total, squares = total + values.sum(), squares + np.square(values).sum()
    count = math.prod(tensor.shape)
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean**2, 0.0))

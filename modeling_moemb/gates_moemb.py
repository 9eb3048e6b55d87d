"""Learned gates of adaptive compute: small modules beside the backbone, each with no effect until it is trained.

- `keep`: after block K, once: which image and video tokens the later blocks see (Dynamic-LLaVA, arXiv 2412.00876).
- `gradual`: before each block, which of the image and video tokens still alive are dropped.
- `skip`: in each block, which tokens run no routed experts (after Mixture-of-Depths, arXiv 2404.02258).
- `null`: in each block, null experts that compete with a token's routed ones and cost nothing (AdaMoE, arXiv
  2406.13233).

Every gate yields log-odds of its *saving* action (drop, skip), in fp32 whatever the precision of the model. What is
decided is executed: dropped tokens are removed by re-packing, skipped experts by leaving their pairs out.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .settings_moemb import validate_gates


KINDS = ("keep", "gradual", "skip", "null")
KEEP_LOGITS = (3.0, -3.0)  # keep, drop: a token is dropped with probability 0.0025 at the start
LIMIT = 6.0  # of the log-odds of a gradual gate: a product of many near-certain gates would have no gradient
DROP_START = LIMIT * math.atanh(-4.0 / LIMIT)  # the bias with log-odds -4
SKIP_START = -4.0
NULL_START = -1e4  # no router logit is below it


class GateHead(nn.Linear):
    """The last layer of a keep gate: zero weights, so that all tokens begin alike."""

    def reset(self) -> None:
        init.zeros_(self.weight)
        init.copy_(self.bias, torch.tensor(KEEP_LOGITS, device=self.bias.device))


def keep_gate_macs(hidden_size: int, width: int) -> int:
    """Multiply-accumulates of a keep gate per token."""
    return 2 * hidden_size * width + 4 * width


class KeepGate(nn.Module):
    """Which visual tokens stay after one early block, from a token's state and the mean over its item.

    Args:
        hidden_size (`int`): width of the decoder.
        width (`int`): width of the gate.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, width)
        self.head = GateHead(2 * width, 2)
        self.macs = keep_gate_macs(hidden_size, width)

    def forward(self, states: Tensor, mean: Tensor) -> Tensor:
        """Log-odds of dropping, fp32 `(rows,)`.

        Args:
            states (`torch.Tensor` of shape `(rows, hidden)`): visual tokens.
            mean (`torch.Tensor` of shape `(rows, hidden)`): for each, the mean over its item, see [`item_means`].
        """
        with torch.autocast(states.device.type, enabled=False):
            features = [self._features(rows) for rows in (states.float(), mean.float())]
            logits = F.linear(torch.cat(features, -1), self.head.weight.float(), self.head.bias.float())
        return logits[:, 1] - logits[:, 0]

    def _features(self, rows: Tensor) -> Tensor:
        normed = F.layer_norm(rows, rows.shape[-1:], self.norm.weight.float(), self.norm.bias.float())
        return F.gelu(F.linear(normed, self.inner.weight.float(), self.inner.bias.float()))


def item_means(states: Tensor, segment: Tensor, items: int) -> Tensor:
    """For each of some tokens the mean of the normalised states of its item's, fp32 `(rows, hidden)`.

    Args:
        states (`torch.Tensor` of shape `(rows, hidden)`): the tokens.
        segment (`torch.LongTensor` of shape `(rows,)`): the item of each, below `items`.
        items (`int`): number of items.
    """
    with torch.autocast(states.device.type, enabled=False):
        normed = F.layer_norm(states.float(), states.shape[-1:])
        segment = segment.to(states.device)
        total = normed.new_zeros(items, normed.shape[1]).index_add(0, segment, normed)
        count = normed.new_zeros(items).index_add(0, segment, torch.ones_like(segment, dtype=normed.dtype))
        return (total / count.clamp_min(1)[:, None]).index_select(0, segment)


class BlockGates(nn.Module):
    """One linear gate for each of some blocks.

    Args:
        hidden_size (`int`): width of the decoder.
        blocks (`list[int]`): the blocks that have a gate.
    """

    start = 0.0

    def __init__(self, hidden_size: int, blocks: list[int]):
        super().__init__()
        self.place = {block: place for place, block in enumerate(blocks)}
        self.weight = nn.Parameter(torch.zeros(len(blocks), hidden_size))
        self.bias = nn.Parameter(torch.full((len(blocks),), self.start))
        self.macs = hidden_size

    @property
    def blocks(self) -> list[int]:
        return list(self.place)

    def reset(self) -> None:
        init.zeros_(self.weight)
        init.constant_(self.bias, self.start)

    def linear(self, block: int, states: Tensor) -> Tensor:
        place = self.place[block]
        return states.float() @ self.weight[place].float() + self.bias[place].float()


class GradualGates(BlockGates):
    """Whether a visual token is dropped before a block, from its normalised state; log-odds within +-6."""

    start = DROP_START

    def forward(self, block: int, states: Tensor) -> Tensor:
        """Log-odds of dropping, fp32 `(rows,)`, of `(rows, hidden)` states before block `block`."""
        with torch.autocast(states.device.type, enabled=False):
            normed = F.rms_norm(states.float(), states.shape[-1:], eps=1e-6)
            return LIMIT * torch.tanh(self.linear(block, normed) / LIMIT)


class SkipGates(BlockGates):
    """Whether a token runs no routed experts in a block, from the router's input; optionally from its top-1 weight.

    Args:
        hidden_size, blocks: as in [`BlockGates`].
        router_top1 (`bool`): whether the gate also sees the token's largest routing weight.
    """

    start = SKIP_START

    def __init__(self, hidden_size: int, blocks: list[int], router_top1: bool = False):
        super().__init__(hidden_size, blocks)
        self.top1 = nn.Parameter(torch.zeros(len(blocks))) if router_top1 else None

    def reset(self) -> None:
        super().reset()
        if self.top1 is not None:
            init.zeros_(self.top1)

    def forward(self, block: int, states: Tensor, top1: Tensor) -> Tensor:
        """Log-odds of skipping, fp32 `(rows,)`.

        Args:
            block (`int`): the block.
            states (`torch.Tensor` of shape `(rows, hidden)`): the router's input.
            top1 (`torch.FloatTensor` of shape `(rows,)`): the largest routing weight of each token.
        """
        with torch.autocast(states.device.type, enabled=False):
            logits = self.linear(block, states)
            return logits if self.top1 is None else logits + self.top1[self.place[block]].float() * top1.float()


class NullExperts(nn.Module):
    """Rows of the router without an expert behind them.

    A token's top-k is taken over true and null experts together. Of its k routed slots the slot of rank `j` is kept if
    its logit exceeds the null logit of rank `k - 1 - j`, which is the same thing slot by slot: the log-odds of leaving
    it out are the difference.

    Args:
        hidden_size (`int`): width of the decoder.
        blocks (`list[int]`): the blocks that have null experts.
        experts (`int`): null experts per block.
    """

    def __init__(self, hidden_size: int, blocks: list[int], experts: int):
        super().__init__()
        self.place = {block: place for place, block in enumerate(blocks)}
        self.weight = nn.Parameter(torch.zeros(len(blocks), experts, hidden_size))
        self.bias = nn.Parameter(torch.full((len(blocks),), NULL_START))
        self.macs = experts * hidden_size

    @property
    def blocks(self) -> list[int]:
        return list(self.place)

    def reset(self) -> None:
        init.zeros_(self.weight)
        init.constant_(self.bias, NULL_START)

    def null_logits(self, block: int, states: Tensor) -> Tensor:
        """Router logits of the null experts, fp32 `(rows, experts)`."""
        place = self.place[block]
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight[place].float()) + self.bias[place].float()

    def forward(self, block: int, states: Tensor, slot_logits: Tensor) -> Tensor:
        """Log-odds of leaving a slot out, fp32 `(rows, slots)`.

        Args:
            block (`int`): the block.
            states (`torch.Tensor` of shape `(rows, hidden)`): the router's input.
            slot_logits (`torch.FloatTensor` of shape `(rows, slots)`): router logits of the experts in the slots.
        """
        slots, null = slot_logits.shape[1], self.null_logits(block, states)
        best = null.topk(min(slots, null.shape[1]), dim=-1).values
        if best.shape[1] < slots:
            best = F.pad(best, (0, slots - best.shape[1]), value=NULL_START)
        rank = slot_logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return best.gather(1, slots - 1 - rank) - slot_logits.float()


class MoEMBGates(nn.Module):
    """The gates of a model; a kind that the configuration does not name is `None`.

    Args:
        settings (`dict`): validated, see [`validate_gates`].
        text_config (`Qwen3_5MoeTextConfig`): the decoder's configuration.
    """

    def __init__(self, settings: dict[str, Any], text_config: Any):
        super().__init__()
        width, self.settings = text_config.hidden_size, dict(settings)
        self.keep = self.gradual = self.skip = self.null = None
        if "keep" in settings:
            self.keep = KeepGate(width, settings["keep"]["width"])
        if "gradual" in settings:
            self.gradual = GradualGates(width, settings["gradual"]["blocks"])
        if "skip" in settings:
            self.skip = SkipGates(width, settings["skip"]["blocks"], settings["skip"]["router_top1"])
        if "null" in settings:
            self.null = NullExperts(width, settings["null"]["blocks"], settings["null"]["experts"])

    def logits(self, kind: str, block: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """Log-odds of the saving action, of inputs as a [`GateQuery`] holds them; differentiable.

        Args:
            kind (`str`): `"keep"`, `"gradual"`, `"skip"` or `"null"`.
            block (`int`): the block that the decision takes effect in.
            inputs (`tuple[torch.Tensor, ...]`): what the gate sees.
        """
        gate = getattr(self, kind)
        place = next(gate.parameters()).device
        inputs = tuple(tensor.to(place) for tensor in inputs)
        return gate(*inputs) if kind == "keep" else gate(block, *inputs)

    def has(self, kind: str, block: int) -> bool:
        """Whether a gate of this kind decides for this block."""
        gate = getattr(self, kind)
        if gate is None:
            return False
        return block == self.settings["keep"]["layer"] if kind == "keep" else block in gate.place

    def switch_off(self, kinds: list[str]) -> None:
        """Take gates away."""
        for kind in kinds:
            setattr(self, kind, None)
            self.settings.pop(kind, None)


def init_gates(module: nn.Module) -> None:
    """Zero effect: called for every module of a model that is built or whose weights are missing."""
    if isinstance(module, (GateHead, BlockGates, NullExperts)):
        module.reset()


def attach_gates(model: Any, settings: dict[str, Any]) -> None:
    """Give a model gates, in place and without any effect on its output; those that it has stay as they are.

    Args:
        model (`MoEMBModel`): the model. Its `config.gates` names all gates afterwards.
        settings (`dict`): gates to add, see [`validate_gates`].

    Raises:
        ValueError: for wrong settings, or other settings of a gate that the model has.
    """
    text = model.config.text_config
    had, wanted = model.config.gates or {}, validate_gates(settings, text) or {}
    for kind in wanted:
        if kind in had and had[kind] != wanted[kind]:
            raise ValueError(
                f"the model has a {kind!r} gate with {had[kind]}: it cannot become one with {wanted[kind]}"
            )
    added = MoEMBGates({kind: value for kind, value in wanted.items() if kind not in had}, text)
    for module in added.modules():
        init_gates(module)
    added = added.to(model.get_input_embeddings().weight.device)
    if model.gates is None:
        model.gates = added
    else:
        for kind in wanted:
            if kind not in had:
                setattr(model.gates, kind, getattr(added, kind))
                model.gates.settings[kind] = wanted[kind]
    model.config.gates = {kind: {**had, **wanted}[kind] for kind in KINDS if kind in {**had, **wanted}}


@torch.no_grad()
def twin_null_experts(model: Any, noise: float = 1e-3, bias: float = 0.0, seed: int = 0) -> None:
    """Start the null experts as copies of the router's rows plus noise (AdaMoE's initialisation).

    With two twins for each expert and `bias=0` a token begins with about a third of its experts; with a bias far below
    the spread of the router's logits it begins with all of them.

    Args:
        model (`MoEMBModel`): a model with a `null` gate.
        noise (`float`, defaults to 1e-3): standard deviation of the noise.
        bias (`float`, defaults to 0.0): added to every null logit.
        seed (`int`, defaults to 0): of the noise.
    """
    null, generator = model.gates.null, torch.Generator().manual_seed(seed)
    for block, place in null.place.items():
        rows = model.language_model.layers[block].mlp.gate.weight.detach().float().cpu()
        twins = rows[torch.arange(null.weight.shape[1]) % rows.shape[0]]
        null.weight[place] = (twins + noise * torch.randn(twins.shape, generator=generator)).to(null.weight)
    null.bias.fill_(bias)


__all__ = [
    "KINDS",
    "BlockGates",
    "GateHead",
    "GradualGates",
    "KeepGate",
    "MoEMBGates",
    "NullExperts",
    "SkipGates",
    "attach_gates",
    "init_gates",
    "item_means",
    "keep_gate_macs",
    "twin_null_experts",
]

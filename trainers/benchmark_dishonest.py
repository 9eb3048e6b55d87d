"""Two ways to apply a policy that save no time or save it where none should be spent, labelled as such.

Masking multiplies by zero what it should leave out: dropped tokens stay in every later block, skipped experts run. It
removes FLOPs on paper only. The expert loop runs one expert after the other on the tokens that chose it: fewer pairs
save a lot of the time, of which it takes several times too much.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from modeling_moemb.adaptive_moemb import BlockDial, ComputeDial, draws_random
from modeling_moemb.routing_moemb import Routing

from .dial_policies import PolicyError
from .saliency import expert_blocks


_ARGUMENTS = ("hidden_states", "packed", "layout", "position_embeddings", "dial", "output_rows")


@contextmanager
def expert_loop(model: Any) -> Iterator[None]:
    """Runs the experts of a model one after the other while the context lasts."""
    experts = [block.experts for block in expert_blocks(model)]
    before = [module.backend for module in experts]
    try:
        for module in experts:
            module.backend = "loop"
        yield
    finally:
        for module, backend in zip(experts, before, strict=True):
            module.backend = backend


class _Masking:
    """The dial as usual, but what it removes is kept and multiplied by zero."""

    def __init__(self, budget: Mapping[str, Any], text_config: Any):
        self.budget, self.text_config = dict(budget), text_config
        self.dial: ComputeDial | None = None
        self.step: BlockDial | None = None
        self.alive: Tensor | None = None

    def before(self, block: int, arguments: Mapping[str, Any]) -> None:
        if block == 0:
            self.dial = ComputeDial(self.budget, self.text_config, arguments["packed"])
            self.alive = None
        self.step = self.dial.begin(block, arguments["packed"], arguments["output_rows"])
        given = arguments["dial"]
        given.wants_attention = self.step.wants_attention
        if self.step.policies:
            given.policies = [lambda routing, step=self.step: zero_weights(routing, step.route(routing))]

    def after(self, block: int, arguments: Mapping[str, Any], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        given, rows, (states, logits) = arguments["dial"], arguments["output_rows"], output
        self.step.beta, self.step.received, self.step.routing = given.beta, given.received, given.routing
        keep = self.dial.end(block, arguments["packed"], self.step, rows)
        self.alive = keep if keep is not None else self.alive
        if self.alive is None:
            return output
        alive = self.alive if rows is None else self.alive[rows]
        return states * alive[:, None].to(states), logits


def zero_weights(routing: Routing, policy: Routing) -> Routing:
    """All pairs of `routing`, with the weights of `policy`, and 0 for those that it leaves out."""
    same = policy.expert_index[:, :, None] == routing.expert_index[:, None, :]
    place = same.int().argmax(dim=-1)  # a skipped slot finds none, and adds its weight of 0 to the first
    weight = torch.zeros_like(routing.weight).scatter_add(1, place, policy.weight.masked_fill(~same.any(-1), 0))
    return Routing(routing.expert_index, weight, routing.num_experts)


@contextmanager
def masking(model: Any, budget: Mapping[str, Any]) -> Iterator[None]:
    """
    Masks what a budget removes while the context lasts; forward must be called with `adaptive_compute={}`,
    `output_compute=True` (which brings a dial into every block) and `share_prefixes=False`.

    Args:
        model (`MoEMBModel`): the model.
        budget (`Mapping`): validated settings.

    Raises:
        PolicyError: the budget draws random numbers, for which the blocks do not see enough.
    """
    if draws_random(dict(budget)):
        raise PolicyError("execution 'masking' is not possible with random_k or the score 'random': choose another")
    work, handles = _Masking(budget, model.config.text_config), []

    def named(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(_ARGUMENTS, args)) | dict(kwargs)

    for number, layer in enumerate(model.language_model.layers):
        handles += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: work.before(number, named(args, kwargs)), with_kwargs=True
            ),
            layer.register_forward_hook(
                lambda _, args, kwargs, output, number=number: work.after(number, named(args, kwargs), output),
                with_kwargs=True,
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

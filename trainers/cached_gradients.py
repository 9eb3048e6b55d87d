"""Cached gradients: the gradients of a whole batch in the memory of one chunk.

1. Every chunk is embedded without gradients; the states of the random generators are kept.
2. The loss of all vectors gives the gradient at each vector.
3. Every chunk is embedded again, with the same random numbers, and the gradient at its vectors is sent backward.

A batch of one chunk is embedded once. After Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup" (2021). Losses on something else than the vectors enter in step 3, see [`Objective`].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .contrastive_loss import LossOutput
from .objectives import Objective, RouterChunk


class RandomState:
    """The states of the random generators of the CPU and of a device, at the time it is made.

    Args:
        device (`torch.device`): Where the model is.
    """

    def __init__(self, device: torch.device):
        self.devices = [device] if device.type == "cuda" else []
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generators give the same numbers again; afterwards they are as they were before."""
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda):
                torch.cuda.set_rng_state(state, device)
            yield


@dataclass
class Embedded:
    """
    What `embed` gives for a chunk.

    Args:
        vectors (`torch.FloatTensor` of shape `(items, dim)`): Vectors, float32.
        router_logits (`tuple[torch.Tensor]`): Of every decoder block, when they were asked for.
        segment (`torch.LongTensor` of shape `(tokens,)`): Item of each token.
        tasks (`torch.LongTensor` of shape `(items,)`): Data set of each item.
    """

    vectors: Tensor
    router_logits: tuple[Tensor, ...]
    segment: Tensor
    tasks: Tensor

    def chunk(self, gradient: Tensor | None = None) -> RouterChunk:
        """The same for an [`Objective`]."""
        return RouterChunk(self.router_logits, self.segment, self.tasks, self.vectors, gradient)


def contrastive_step(
    chunks: Sequence[Any],
    embed: Callable[[Any], Embedded],
    loss: Callable[[Tensor], LossOutput],
    backward: Callable[[Tensor], None],
    objectives: Sequence[Objective] = (),
    device: torch.device | str = "cpu",
    idle: int = 0,
) -> LossOutput:
    """
    Adds the gradients of a batch to the parameters.

    Args:
        chunks (`Sequence`): The batch in pieces, in the order of its items.
        embed (`Callable`): Embeds one of them; it is called once or twice per chunk and must give the same each time.
        loss (`Callable`): The loss of all vectors, float32 `(items, dim)`.
        backward (`Callable`): Sends a scalar backward.
        objectives (`Sequence[Objective]`, *optional*): Further losses; those that are not active are not called.
        device (`torch.device`, *optional*, defaults to the CPU): Where the model is.
        idle (`int`, *optional*, defaults to 0):
            Times that the last chunk is embedded once more to no effect: where parameters are spread over processes,
            all have to call the model equally often.

    Returns:
        `LossOutput`: of the contrastive loss.
    """
    objectives = [objective for objective in objectives if objective.active]
    for objective in objectives:
        objective.begin_step()
    vectors, states, kept = [], [], None
    once = len(chunks) + idle == 1
    for chunk in chunks:
        states.append(RandomState(torch.device(device)))
        with torch.set_grad_enabled(once):
            embedded = embed(chunk)
        for objective in objectives:
            objective.first_pass(_detached(embedded).chunk())
        vectors.append(embedded.vectors.detach())
        kept = embedded if once else None
    for objective in objectives:
        objective.reduce()
    with torch.no_grad():
        for _ in range(idle):
            embed(chunks[-1])
    leaf = torch.cat(vectors).requires_grad_()
    output = loss(leaf)
    output.loss.backward()
    for chunk, state, gradient in zip(chunks, states, leaf.grad.split([len(part) for part in vectors])):
        if kept is None:
            with state.again():
                _send_back(embed(chunk), gradient, objectives, backward)
        else:
            _send_back(kept, gradient, objectives, backward)
    for _ in range(idle):
        backward(0.0 * embed(chunks[-1]).vectors.sum())
    for objective in objectives:
        objective.end_step()
    return output


def _send_back(
    embedded: Embedded, gradient: Tensor, objectives: Sequence[Objective], backward: Callable[[Tensor], None]
) -> None:
    surrogate = (embedded.vectors * gradient).sum()
    for objective in objectives:
        surrogate = surrogate + objective.second_pass(embedded.chunk(gradient))
    backward(surrogate)


def _detached(embedded: Embedded) -> Embedded:
    logits = tuple(logits.detach() for logits in embedded.router_logits)
    return Embedded(embedded.vectors.detach(), logits, embedded.segment, embedded.tasks)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], most: int = 1 << 25) -> None:
    """
    Averages the gradients of the parameters over all processes, in float32.

    A parameter without a gradient counts as zero where another process has one, and stays without where none has: so
    a process whose items have no pictures does not hold the others up.

    Args:
        parameters (`Sequence[nn.Parameter]`): The same ones, in the same order, in every process.
        most (`int`, *optional*): Values that are sent at once.
    """
    if not parameters or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    chosen = [p for p, some in zip(parameters, present.tolist()) if some]
    for parameter in chosen:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[nn.Parameter] = []
    for number, parameter in enumerate(chosen):
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= most or number == len(chosen) - 1:
            flat = torch.cat([p.grad.reshape(-1).float() for p in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p))
            bucket = []


def most_over_processes(number: int, device: torch.device) -> int:
    """The largest of the processes' numbers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    value = torch.tensor([number], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)

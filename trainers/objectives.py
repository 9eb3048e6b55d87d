"""What a loss beside the contrast has to offer so that it works under cached gradients.

A step embeds its batch in chunks, twice: without gradients to get the vectors, and with gradients once the loss has
said what each vector's gradient is. A loss on something else than the vectors, such as the router's logits, is not in
that gradient: it is added to each chunk of the second pass, with statistics of the whole batch from the first.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass
class RouterChunk:
    """What the model gave for one chunk of a batch.

    Args:
        router_logits (`tuple[torch.FloatTensor]`): per decoder block `(tokens, num_experts)`, fp32; the last block's
            are of the pooled tokens alone, `(items, num_experts)`. With a graph in the second pass.
        segment (`torch.LongTensor` of shape `(tokens,)`): the item of the chunk that each packed token belongs to. For
            the last block it is `arange(items)`.
        tasks (`torch.LongTensor` of shape `(items,)`): number of each item's dataset, in the order of the recipe.
        pooled (`torch.FloatTensor` of shape `(items, hidden)`): the vectors; with a graph in the second pass.
        pooled_grad (`torch.FloatTensor` of shape `(items, hidden)`, *optional*): gradient of the contrastive loss at
            `pooled`, in the second pass.
    """

    router_logits: tuple[Tensor, ...]
    segment: Tensor
    tasks: Tensor
    pooled: Tensor
    pooled_grad: Tensor | None = None


class Objective(Protocol):
    """A loss beside the contrast. The trainer calls the methods in the order they stand here, at every step.

    Attributes:
        active (`bool`): whether there is anything to compute; when false nothing is called and the router's logits are
            not asked for.
    """

    active: bool

    def begin_step(self) -> None:
        """Forgets the statistics of the last batch."""

    def first_pass(self, chunk: RouterChunk) -> None:
        """Takes in a chunk, without gradients. A batch that is one chunk is seen here too."""

    def reduce(self) -> None:
        """Adds up the statistics over all processes; every process calls it once, after its first pass."""

    def second_pass(self, chunk: RouterChunk) -> Tensor:
        """The chunk's share of the weighted loss, a scalar with a graph.

        The shares of all chunks of all processes add up to the loss of the batch times the number of processes, for
        gradients are averaged over them.
        """

    def end_step(self) -> None:
        """Called after the last backward of the step, before the optimizer's."""

    def metrics(self) -> dict[str, float]:
        """Values of this step for the log."""

    def state_dict(self) -> dict[str, Any]:
        """What an exact continuation needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores [`Objective.state_dict`]."""

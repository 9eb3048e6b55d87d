"""The weighted mixture of homogeneous sub-batches that one training step sees.

Everything is a function of (seed, step): which sources give a sub-batch, which rows they give, and every random draw.
So a run that was killed and resumed at step s sees exactly the batches it would have seen, with nothing to save.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .data import Sample
from .errors import MoEMBError


class MixtureError(MoEMBError, ValueError):
    """A mixture that cannot be drawn."""


@dataclass
class Contrast:
    """Which rows of a group are contrasted with which.

    Args:
        queries (`list[int]`): Rows of the group that ask.
        documents (`list[int]`): Rows of the group that answer. Rows may be in both lists: then the pair of a row with
            itself is left out.
        symmetric (`bool`, *optional*, defaults to `True`): Also from documents to queries.
        weight (`float`, *optional*, defaults to 1.0): Factor of this loss.
    """

    queries: list[int]
    documents: list[int]
    symmetric: bool = True
    weight: float = 1.0


@dataclass
class Group:
    """One homogeneous sub-batch.

    Args:
        source (`str`): Name of the source, for the log.
        samples (`list[Sample]`): The rows.
        keys (`list`): Per row, what it is about: a query and a document are a right pair when their keys are equal.
        contrasts (`list[Contrast]`): The losses over these rows.
        text_targets (`list[str | None]`, *optional*): Per row, the text whose teacher vector it should match.
        image_targets (`list[str | None]`, *optional*): Per row, the key of the image whose teacher vector it should
            match.
    """

    source: str
    samples: list[Sample]
    keys: list
    contrasts: list[Contrast]
    text_targets: list[str | None] = field(default_factory=list)
    image_targets: list[str | None] = field(default_factory=list)

    def __post_init__(self):
        rows = len(self.samples)
        self.text_targets = self.text_targets or [None] * rows
        self.image_targets = self.image_targets or [None] * rows
        for name in ("keys", "text_targets", "image_targets"):
            if len(getattr(self, name)) != rows:
                raise MixtureError(f"{self.source}: {len(getattr(self, name))} {name} for {rows} samples.")


class Source(Protocol):
    """A kind of training pair.

    Attributes:
        name (`str`): For the recipe and the log.
        size (`int`): Number of things to draw from (concepts, pairs, strings).
        chunk (`int`): Things in one sub-batch.
    """

    name: str
    size: int
    chunk: int

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        """Builds the sub-batch of the things `indices` (int64 `[chunk]`)."""
        ...


class Mixture:
    """Draws sub-batches from sources at given rates.

    A source with rate 0.5 gives a sub-batch at every second step, one with rate 2 gives two sub-batches a step.
    Each source walks through its things in a new random order per pass, without repetition inside a pass.

    Args:
        sources (`Sequence[Source]`): The sources, with distinct names.
        rates (`Sequence[float]`): Sub-batches per step of each source.
        seed (`int`, *optional*, defaults to 0): Seed of all draws.

    Raises:
        MixtureError: For a negative rate, a repeated name, a source without things, or when nothing is left to draw.
    """

    def __init__(self, sources: Sequence[Source], rates: Sequence[float], seed: int = 0):
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise MixtureError(f"Source names repeat: {names}.")
        for source, rate in zip(sources, rates, strict=True):
            if rate < 0:
                raise MixtureError(f"Source {source.name!r} has rate {rate}: rates are sub-batches per step, >= 0.")
            if rate > 0 and source.size < 1:
                raise MixtureError(
                    f"Source {source.name!r} is empty but has rate {rate}: set its rate to 0 or rebuild the corpus."
                )
        self.entries = [(source, float(rate)) for source, rate in zip(sources, rates, strict=True) if rate > 0]
        if not self.entries:
            raise MixtureError("Every source has rate 0: there is nothing to train on.")
        self.seed = seed
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def chunks(self, step: int, entry: int) -> range:
        """Numbers of the sub-batches that source `entry` gives at `step` (they count up over the whole run)."""
        _, rate = self.entries[entry]
        # Offsets by the golden ratio spread sources of equal fractional rates over different steps.
        offset = entry * 0.6180339887 % 1.0
        return range(int(step * rate + offset), int((step + 1) * rate + offset))

    def groups(self, step: int) -> list[Group]:
        """The sub-batches of a step. At least one: a step at which no source is due takes the first source's next.

        Args:
            step (`int`): Number of the step, from 0.
        """
        groups = []
        for entry, (source, _) in enumerate(self.entries):
            for chunk in self.chunks(step, entry):
                groups.append(self._draw(entry, source, chunk))
        if not groups:
            groups.append(self._draw(0, self.entries[0][0], self.chunks(step, 0).start))
        return groups

    def _draw(self, entry: int, source: Source, chunk: int) -> Group:
        rng = np.random.default_rng([self.seed, entry, chunk])
        positions = np.arange(chunk * source.chunk, (chunk + 1) * source.chunk)
        indices = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(positions // source.size):
            here = positions // source.size == number
            indices[here] = self._order(entry, int(number), source.size)[positions[here] % source.size]
        return source.draw(indices, rng)

    def _order(self, entry: int, number: int, size: int) -> np.ndarray:
        """The random order of pass `number` through a source (the last few are kept)."""
        key = (entry, number)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.entries):
                self._orders.clear()
            self._orders[key] = np.random.default_rng([self.seed, entry, number, 7]).permutation(size)
        return self._orders[key]

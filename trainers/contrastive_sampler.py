"""Which rows make the batch of each step: a weighted mixture of data sets in homogeneous sub-batches.

The batches are a function of (seed, epoch): a run that goes on sees the batches it would have seen, and the batch over
all processes does not depend on their number.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import DataLoader, Dataset

from .contrastive_data import PairDataset, Row
from .contrastive_sources import DataError


class MixtureRows(Dataset):
    """All rows of several data sets in a row.

    Args:
        datasets (`Sequence[PairDataset]`): The data sets.
    """

    def __init__(self, datasets: Sequence[PairDataset]):
        self.datasets = list(datasets)
        self.bounds = np.cumsum([0, *map(len, self.datasets)])

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: int) -> Row:
        number = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return self.datasets[number][int(index - self.bounds[number])]


class MixtureBatchSampler:
    """
    Batches of row numbers for one process.

    An epoch has as many batches as the rows fill. Its sub-batches are shared out over the data sets by weight, to the
    nearest one, and shuffled; each data set is walked through in a new random order per pass. So with the default
    weights an epoch sees every row once, up to rounding.

    Args:
        sizes (`Sequence[int]`): Rows of each data set.
        weights (`Sequence[float | None]`): Its weight; `None` is its number of rows.
        batch_size (`int`): Rows of a batch over all processes.
        sub_batch_size (`int`): Consecutive rows from one data set; divides `batch_size`.
        seed (`int`, *optional*, defaults to 0): Seed of all draws.
        rank (`int`, *optional*, defaults to 0): This process, which gets the `rank`-th part of each batch.
        world_size (`int`, *optional*, defaults to 1): Number of processes; divides `batch_size`.

    Raises:
        DataError: when there are fewer rows than one batch has.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float | None],
        batch_size: int,
        sub_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.sizes = list(sizes)
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        shares = np.array([size if weight is None else weight for size, weight in zip(sizes, weights)], dtype=float)
        self.shares = shares / shares.sum()
        self.batch_size, self.sub_batch_size, self.seed = batch_size, sub_batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        if sum(self.sizes) < batch_size:
            raise DataError(
                f"the data sets have {sum(self.sizes)} rows together, fewer than one batch: lower batch_size="
                f"{batch_size}"
            )

    def __len__(self) -> int:
        return sum(self.sizes) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration gives."""
        self.epoch = epoch

    def sub_batches(self, epoch: int) -> np.ndarray:
        """The data set of each sub-batch of an epoch, int64 `[sub-batches]`."""
        total = len(self) * (self.batch_size // self.sub_batch_size)
        # the rounded cumulative shares, over all epochs: what one epoch rounds away another one gets
        upto = np.rint(np.cumsum(self.shares)[None] * total * np.array([[epoch], [epoch + 1]])).astype(np.int64)
        counts = np.diff(np.diff(upto, axis=0)[0], prepend=0)
        labels = np.repeat(np.arange(len(self.sizes)), counts)
        return np.random.default_rng([self.seed, epoch, 0xBA7C]).permutation(labels)

    def __iter__(self) -> Iterator[list[int]]:
        labels = self.sub_batches(self.epoch)
        drawn = self._drawn_before(self.epoch)
        per_batch = self.batch_size // self.sub_batch_size
        mine = self.batch_size // self.world_size
        for step in range(len(self)):
            rows: list[int] = []
            for number in labels[step * per_batch : (step + 1) * per_batch]:
                rows += self._rows(int(number), drawn[number])
                drawn[number] += self.sub_batch_size
            yield rows[self.rank * mine : (self.rank + 1) * mine]

    def _drawn_before(self, epoch: int) -> list[int]:
        """Rows that each data set gave in all epochs before."""
        counts = np.zeros(len(self.sizes), dtype=np.int64)
        for earlier in range(epoch):
            counts += np.bincount(self.sub_batches(earlier), minlength=len(self.sizes))
        return (counts * self.sub_batch_size).tolist()

    def _rows(self, number: int, start: int) -> list[int]:
        """Rows `start ... start + sub_batch_size` of the endless walk through a data set."""
        positions = np.arange(start, start + self.sub_batch_size)
        size = self.sizes[number]
        rows = np.empty(len(positions), dtype=np.int64)
        for turn in np.unique(positions // size):
            here = positions // size == turn
            rows[here] = self._order(number, int(turn))[positions[here] % size]
        return (rows + self.starts[number]).tolist()

    def _order(self, number: int, turn: int) -> np.ndarray:
        """The random order of pass `turn` through a data set (the last few are kept)."""
        key = (number, turn)
        kept = self._orders
        if key not in kept:
            if len(kept) >= 2 * len(self.sizes):
                kept.pop(next(iter(kept)))
            kept[key] = np.random.default_rng([self.seed, number, turn, 7]).permutation(self.sizes[number])
        return kept[key]


class MixtureLoader(DataLoader):
    """A `DataLoader` that passes the epoch on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Called by `Trainer` at the start of an epoch."""
        self.batch_sampler.set_epoch(epoch)

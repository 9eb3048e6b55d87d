"""Workers of one machine: processes that take shards from a queue, replaced when they die.

A shard whose worker died is given to another. One that kills its workers again and again (out of memory, a decoder
that crashes) is named after `_MOST_DEATHS`, and the others are finished first.
"""

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .encode_inputs import Source
from .encode_shards import EncodeError, EncodeSettings, ShardEncoder, ShardResult
from .errors import MoEMBError


_MOST_DEATHS = 3
_POLL_SECONDS = 0.2


@dataclass
class _Worker:
    """A process, its inbox, and the shard that it has."""

    process: Any
    inbox: Any
    shard: int | None = None


def device_of(number: int, device: str | None) -> str | None:
    """The device of the `number`-th worker: the graphics cards in turn, unless one is named."""
    import torch

    if device is not None:
        return device
    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if count else "cpu"


def encode_alone(
    settings: EncodeSettings, source: Source, shards: int, plan: str, pending: Sequence[int], on_rows: Callable
) -> Iterator[ShardResult]:
    """Encodes shards in this process."""
    encoder = ShardEncoder(settings, source, shards, plan)
    for shard in pending:
        yield encoder.encode(shard, on_rows)


def encode_by_processes(
    settings: EncodeSettings, source: Source, shards: int, plan: str, pending: Sequence[int], workers: int
) -> Iterator[ShardResult]:
    """
    Encodes shards in processes of their own.

    Args:
        settings (`EncodeSettings`): how.
        source (`Source`): what.
        shards (`int`): of the plan.
        plan (`str`): fingerprint of the plan.
        pending (`Sequence[int]`): shards to make.
        workers (`int`): processes.

    Yields:
        `ShardResult`: as they are done, in no order.

    Raises:
        EncodeError: a shard fails, or kills its workers.
    """
    context = multiprocessing.get_context("spawn")
    outbox = context.Queue()
    waiting, deaths = list(pending)[::-1], dict.fromkeys(pending, 0)
    team: list[_Worker] = []

    def start(number: int) -> _Worker:
        inbox = context.Queue()
        job = (settings, source, shards, plan, device_of(number, settings.device), inbox, outbox, number)
        process = context.Process(target=_work, args=job, daemon=True)
        process.start()
        return _Worker(process, inbox)

    try:
        team += [start(number) for number in range(min(workers, len(waiting)))]
        left = len(waiting)
        while left:
            for number, worker in enumerate(team):
                if not worker.process.is_alive() and (worker.shard is not None or waiting):
                    team[number] = _replace(worker, waiting, deaths, lambda number=number: start(number))
                    worker = team[number]
                if worker.shard is None and waiting:
                    worker.shard = waiting.pop()
                    worker.inbox.put(worker.shard)
            try:
                number, kind, content = outbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if kind == "failed":
                raise EncodeError(content)
            # a worker may have died right after it answered: what it wrote counts, and once
            if team[number].shard == content.shard:
                team[number].shard = None
                left -= 1
                yield content
    finally:
        for worker in team:
            worker.inbox.put(None)
        end = time.monotonic() + 5
        for worker in team:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _replace(worker: _Worker, waiting: list[int], deaths: dict[int, int], start: Callable[[], _Worker]) -> _Worker:
    """A new worker for one that died; its shard goes back to the front, but for one that kills too often."""
    shard, status = worker.shard, worker.process.exitcode
    if shard is None:
        raise EncodeError(f"a worker ended with status {status} before it had a shard; its message is above")
    deaths[shard] += 1
    if deaths[shard] >= _MOST_DEATHS:
        raise EncodeError(
            f"shard {shard} killed {deaths[shard]} workers (status {status}): is there memory for --workers copies of "
            "the model? Shards that are done are kept; run again with fewer workers or a smaller --batch-size"
        )
    waiting.append(shard)
    return start()


def _work(
    settings: EncodeSettings, source: Source, shards: int, plan: str, device: str | None, inbox, outbox, number: int
) -> None:
    """The life of a worker."""
    try:
        settings.device = device
        encoder = None
        while (shard := inbox.get()) is not None:
            if encoder is None:
                encoder = ShardEncoder(settings, source, shards, plan)
            outbox.put((number, "done", encoder.encode(shard)))
    except KeyboardInterrupt:
        return
    except (MoEMBError, OSError) as error:
        outbox.put((number, "failed", str(error)))
    except Exception:
        outbox.put((number, "failed", traceback.format_exc()))

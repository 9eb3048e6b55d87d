"""The same shards on a Ray Data cluster: a pool of actors that each hold the model.

Ray restarts an actor that died and gives its shard to another; as a shard is one file that appears by a rename, a
shard that was made twice is there once. All nodes must see the input and the output folder (a shared file system).
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from .encode_inputs import Source
from .encode_shards import EncodeError, EncodeSettings, ShardEncoder, ShardResult


class _Actor:
    """One worker of the cluster."""

    def __init__(self, settings: EncodeSettings, source: Source, shards: int, plan: str):
        import torch

        if settings.device is None:
            settings.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encoder = ShardEncoder(settings, source, shards, plan)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = [self.encoder.encode(int(shard)) for shard in batch["shard"]]
        return {
            "shard": [result.shard for result in done],
            "rows": [result.rows for result in done],
            "failed": [result.failed for result in done],
            "process": [os.getpid() for _ in done],
        }


def encode_by_ray(
    settings: EncodeSettings,
    source: Source,
    shards: int,
    plan: str,
    pending: Sequence[int],
    workers: int,
    address: str | None = None,
) -> Iterator[ShardResult]:
    """
    Encodes shards on a Ray cluster.

    Args:
        settings (`EncodeSettings`): how.
        source (`Source`): what.
        shards (`int`): of the plan.
        plan (`str`): fingerprint of the plan.
        pending (`Sequence[int]`): shards to make.
        workers (`int`): actors at most.
        address (`str`, *optional*): of the cluster; `RAY_ADDRESS`, or a cluster of this machine alone.

    Yields:
        `ShardResult`: as they are done, in no order.

    Raises:
        EncodeError: Ray is not installed, or a shard fails.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EncodeError('--ray needs Ray Data: pip install "moemb[encode]"') from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    gpus = 1 if ray.cluster_resources().get("GPU") and settings.device in (None, "cuda") else 0
    rows = ray.data.from_items([{"shard": int(shard)} for shard in pending], override_num_blocks=len(pending))
    results = rows.map_batches(
        _Actor,
        fn_constructor_args=(settings, source, shards, plan),
        batch_size=1,
        concurrency=(1, max(1, workers)),
        num_cpus=0 if gpus else settings.threads or 1,
        num_gpus=gpus,
        # an actor that dies is started again, and what it was doing is done again
        max_restarts=-1,
        max_task_retries=-1,
    )
    try:
        for row in results.iter_rows():
            yield ShardResult(row["shard"], row["rows"], row["failed"])
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, EncodeError):
            raise EncodeError(str(cause)) from error
        raise EncodeError(f"Ray: {_last_lines(cause)}. Shards that are done are kept; run again to go on") from error
    finally:
        if started:
            ray.shutdown()


def _last_lines(error: BaseException) -> str:
    return " ".join(str(error).strip().splitlines()[-3:])[:600]

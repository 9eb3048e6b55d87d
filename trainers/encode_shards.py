"""One shard of an encoded corpus: a range of rows in, one Parquet file of ids and vectors out, whole or not at all.

A shard is written under another name and takes its own by a rename, so it exists once and complete, whoever writes it
and however often: the plan fixes which rows it holds and how they are batched. What could not be embedded stands in a
file beside it, which is there before the shard is.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modeling_moemb.items_moemb import ItemError

from .encode_inputs import Source, loaded
from .errors import MoEMBError


SHARDS, FAILURES = "shards", "failures"
PRECISIONS = ("float32", "float16")
_WINDOW_BATCHES = 8


class EncodeError(MoEMBError, RuntimeError):
    """A corpus that cannot be encoded as asked. The message names the shard or item and the remedy."""


@dataclass
class EncodeSettings:
    """
    How a corpus is encoded; pickles, for workers.

    Args:
        model (`str`): folder or Hub id.
        revision (`str`, *optional*): commit of a Hub id.
        output (`str`): absolute folder.
        side (`str`): `document`, `query` or `none`, which decides the prompt.
        adaptive_compute (`dict`, *optional*): compute budget; the model's own when `None`.
        truncate_dim (`int`, *optional*): columns to keep, normalised again.
        precision (`str`): of the vectors on disk.
        batch_size (`int`): items in one forward pass.
        shard_size (`int`): rows of a shard.
        on_error (`str`): `skip` or `stop` at an item that cannot be embedded.
        device (`str`, *optional*): as torch chooses when `None`.
        threads (`int`, *optional*): of torch in each worker.
    """

    model: str
    output: str
    revision: str | None = None
    side: str = "document"
    adaptive_compute: Mapping[str, Any] | None = None
    truncate_dim: int | None = None
    precision: str = "float32"
    batch_size: int = 32
    shard_size: int = 4096
    on_error: str = "skip"
    device: str | None = None
    threads: int | None = None

    def decisive(self) -> dict[str, Any]:
        """What the vectors and the shards depend on; where and how fast they are made is left out."""
        return {key: value for key, value in vars(self).items() if key not in ("output", "device", "threads", "model")}


@dataclass
class ShardResult:
    """What came of a shard: its number, rows with a vector, and rows without one."""

    shard: int
    rows: int
    failed: int = 0
    examples: list[str] = field(default_factory=list)


def shard_path(output: Path, shard: int, shards: int) -> Path:
    """File of a shard, such as `shards/shard-00007-of-00120.parquet`."""
    return output / SHARDS / f"shard-{shard:05d}-of-{shards:05d}.parquet"


def failures_path(output: Path, shard: int, shards: int) -> Path:
    """File of the rows of a shard that have no vector; absent when all have one."""
    return output / FAILURES / f"shard-{shard:05d}-of-{shards:05d}.jsonl"


def read_result(output: Path, shard: int, shards: int) -> ShardResult | None:
    """What a finished shard says of itself; `None` when it is not there or unreadable (it is then made again)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = shard_path(output, shard, shards)
    if not path.is_file():
        return None
    try:
        about = json.loads(pq.read_metadata(path).metadata[b"moemb"])
        return ShardResult(shard, about["rows"], about["failed"])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError):
        return None


class ShardEncoder:
    """
    A loaded model that encodes shards.

    Args:
        settings (`EncodeSettings`): how.
        source (`Source`): what.
        shards (`int`): number of shards of the plan.
        plan (`str`): fingerprint of the plan, kept in each shard.
    """

    def __init__(self, settings: EncodeSettings, source: Source, shards: int, plan: str):
        import torch
        from sentence_transformers import SentenceTransformer

        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings, self.source, self.shards, self.plan = settings, source, shards, plan
        self.model = SentenceTransformer(
            settings.model,
            trust_remote_code=True,
            device=settings.device,
            revision=settings.revision,
            truncate_dim=settings.truncate_dim,
        )
        self.total = source.count()

    def encode(self, shard: int, on_rows=lambda count: None) -> ShardResult:
        """
        Encodes and writes a shard.

        Args:
            shard (`int`): its number, from 0.
            on_rows (`Callable[[int], None]`, *optional*): told of rows that are done.

        Raises:
            EncodeError: an item cannot be embedded and `on_error` is `stop`, or none of a shard can.
            OSError: the disk is full.
        """
        output = Path(self.settings.output)
        start = shard * self.settings.shard_size
        stop = min(start + self.settings.shard_size, self.total)
        path, failures = shard_path(output, shard, self.shards), failures_path(output, shard, self.shards)
        mark = f"{socket.gethostname()}-{os.getpid()}"
        partial = path.with_name(f".{path.name}.{mark}")
        broken = failures.with_name(f".{failures.name}.{mark}")
        path.parent.mkdir(parents=True, exist_ok=True)
        failures.parent.mkdir(parents=True, exist_ok=True)
        try:
            with broken.open("w", encoding="utf-8") as stream:
                result = self._write(shard, start, stop, partial, stream, on_rows)
            if result.failed:
                os.replace(broken, failures)
            else:
                failures.unlink(missing_ok=True)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
            broken.unlink(missing_ok=True)
        return result

    def _write(self, shard: int, start: int, stop: int, partial: Path, failures: Any, on_rows) -> ShardResult:
        import pyarrow.parquet as pq

        result, writer = ShardResult(shard, 0), None
        schema = _schema(self._dimension(), self.settings.precision)
        try:
            writer = pq.ParquetWriter(partial, schema, compression="zstd")
            for rows in _windows(self.source.read(start, stop), self.settings.batch_size * _WINDOW_BATCHES):
                ids, vectors, errors = self._embed(rows)
                for name, reason in errors:
                    failures.write(json.dumps({"id": name, "error": reason}, ensure_ascii=False) + "\n")
                result.examples += [f"{name}: {reason}" for name, reason in errors][: 3 - len(result.examples)]
                result.failed += len(errors)
                result.rows += len(ids)
                if ids:
                    writer.write_table(_table(ids, vectors, schema))
                on_rows(len(rows))
            if result.failed == stop - start:
                raise EncodeError(
                    f"none of the {result.failed} items of shard {shard} can be embedded, such as "
                    f"{result.examples[0]}; is the right column or folder named?"
                )
            about = {"shard": shard, "rows": result.rows, "failed": result.failed, "plan": self.plan}
            writer.add_key_value_metadata({"moemb": json.dumps(about)})
        finally:
            if writer is not None:
                writer.close()
        _sync(partial)
        return result

    def _dimension(self) -> int:
        return int(self.model.get_embedding_dimension())

    def _embed(self, rows: Sequence[tuple[str, Any]]) -> tuple[list[str], np.ndarray, list[tuple[str, str]]]:
        """Vectors of the rows that can be embedded, and why the others cannot."""
        ids, items, errors = [], [], []
        for name, item in rows:
            try:
                items.append(loaded(item))
                ids.append(name)
            except (OSError, UnicodeDecodeError) as error:
                self._refuse(errors, name, error)
        try:
            return ids, self._vectors(items), errors
        except ItemError:
            pass
        good_ids, good = [], []
        for name, item in zip(ids, items, strict=True):
            try:
                self.model.preprocess([item])
            except ItemError as error:
                self._refuse(errors, name, error)
            else:
                good_ids.append(name)
                good.append(item)
        return good_ids, self._vectors(good), errors

    def _refuse(self, errors: list[tuple[str, str]], name: str, error: Exception) -> None:
        reason = " ".join(str(error).split()).removeprefix("item 0: ")
        if self.settings.on_error == "stop":
            raise EncodeError(f"{name} cannot be embedded: {reason}; mend it, or pass --on-error skip")
        errors.append((name, reason))

    def _vectors(self, items: list[Any]) -> np.ndarray:
        if not items:
            return np.zeros((0, self._dimension()), np.float32)
        side = self.settings.side
        encode = {"document": self.model.encode_document, "query": self.model.encode_query}.get(
            side, self.model.encode
        )
        more: dict[str, Any] = {}
        if self.settings.adaptive_compute is not None:
            more["adaptive_compute"] = dict(self.settings.adaptive_compute)
        if side == "none":
            more["prompt"] = ""
        vectors = encode(items, batch_size=self.settings.batch_size, show_progress_bar=False, **more)
        vectors = np.asarray(vectors, dtype=np.float32)
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(broken):
            raise EncodeError(f"{len(broken)} of {len(items)} vectors are not finite; do the weights fit this dtype?")
        return vectors


def _windows(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    window: list[Any] = []
    for row in rows:
        window.append(row)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def _schema(dimension: int, precision: str) -> Any:
    import pyarrow as pa

    kind = {"float32": pa.float32(), "float16": pa.float16()}[precision]
    return pa.schema([("id", pa.string()), ("vector", pa.list_(kind, dimension))])


def _table(ids: list[str], vectors: np.ndarray, schema: Any) -> Any:
    import pyarrow as pa

    kind = schema.field("vector").type
    flat = pa.array(np.ascontiguousarray(vectors).astype(kind.value_type.to_pandas_dtype()).reshape(-1))
    columns = [pa.array(ids, pa.string()), pa.FixedSizeListArray.from_arrays(flat, kind.list_size)]
    return pa.Table.from_arrays(columns, schema=schema)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())

"""Safetensors files by byte range: read headers, average rows, stream-write shards. Nothing whole is ever in memory.

The safetensors library maps a shard into the address space to read it and wants every tensor of a shard in memory to
write it. A checkpoint that is larger than the machine needs neither: a tensor here is a byte range of a file, a new
tensor is a list of byte ranges, and writing a shard is copying them in blocks. Format:
https://huggingface.co/docs/safetensors/index (8-byte little-endian header length, JSON header, tensor data).
"""

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import MoEMBError


ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_SIZE |= {"F8_E4M3": 1, "F8_E5M2": 1}
BLOCK_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"


class ConversionError(MoEMBError, RuntimeError):
    """A checkpoint that cannot be converted; the text names the file or key and the remedy."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: where its bytes lie.

    Args:
        file (`Path`): the shard.
        dtype (`str`): safetensors name, for example `"BF16"`.
        shape (`tuple[int, ...]`): dimensions.
        offset (`int`): first byte, counted from the start of the file.
        num_bytes (`int`): length of the data.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.num_bytes // self.shape[0]


@dataclass(frozen=True)
class Segment:
    """Bytes of a new tensor: a range of a stored one, the `literal` bytes themselves, or `blocks` to compute."""

    num_bytes: int
    file: Path | None = None
    offset: int = 0
    literal: bytes = b""
    blocks: Callable[[], Iterator[bytes]] | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its name, type, shape and the segments whose concatenation is its data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def whole(tensor: StoredTensor) -> Segment:
    """The segment that copies a stored tensor."""
    return Segment(tensor.num_bytes, tensor.file, tensor.offset)


def rows(tensor: StoredTensor, start: int, stop: int) -> Segment:
    """The segment that copies rows `start` to `stop` of a stored tensor."""
    return Segment((stop - start) * tensor.row_bytes, tensor.file, tensor.offset + start * tensor.row_bytes)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one safetensors file and check that the file holds all the bytes it promises.

    Raises:
        ConversionError: a missing, truncated, git-lfs pointer or otherwise unreadable file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise ConversionError(
                    f"{path} is a git-lfs pointer, not the weights; run 'git lfs pull' in its folder"
                )
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ConversionError(f"{path} is not a safetensors file or is cut short; download it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ConversionError(f"weight file {path} is missing; download it again") from None
    except (ValueError, RecursionError):
        raise ConversionError(f"{path} has an unreadable safetensors header; download it again") from None
    if not isinstance(header, dict):
        raise ConversionError(
            f"{path} has a safetensors header that is a {type(header).__name__}, not a mapping; download it again"
        )
    header.pop("__metadata__", None)
    tensors = {key: _stored_tensor(path, key, entry, 8 + length) for key, entry in header.items()}
    promised = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    if promised > size:
        raise ConversionError(f"{path} is cut short: {promised} bytes promised, {size} there; download it again")
    _check_overlap(path, tensors)
    return tensors


def _stored_tensor(path: Path, key: str, entry, data_start: int) -> StoredTensor:
    """One entry of a header, checked; `data_start` is where the offsets count from."""
    if not isinstance(entry, dict):
        raise ConversionError(f"the entry of '{key}' in {path} is {entry!r}, not a mapping; download it again")
    dtype, shape, offsets = (entry.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ConversionError(f"'{key}' in {path} has the type {dtype}, which the converter does not know")
    if not _are_counts(shape):
        raise ConversionError(f"'{key}' in {path} has the shape {shape!r}, not a list of sizes; download it again")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConversionError(
            f"'{key}' in {path} has data_offsets {offsets!r}, not [begin, end] within the data; download it again"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise ConversionError(f"'{key}' in {path} promises {tuple(shape)} {dtype} but holds {end - begin} bytes")
    return StoredTensor(path, dtype, tuple(shape), data_start + begin, end - begin)


def _are_counts(values) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_overlap(path: Path, tensors: dict[str, StoredTensor]) -> None:
    filled = sorted((t.offset, t.offset + t.num_bytes, key) for key, t in tensors.items() if t.num_bytes)
    for (_, end, key), (begin, _, following) in itertools.pairwise(filled):
        if begin < end:
            raise ConversionError(f"'{key}' and '{following}' overlap in {path}; download it again")


def read_json_mapping(path: Path) -> dict:
    """Read a JSON file of a checkpoint that must hold an object.

    Raises:
        ConversionError: the file is not JSON in UTF-8, or holds something else than an object.
        FileNotFoundError: there is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of a whole checkpoint, sharded or not.

    Args:
        folder (`Path`): holds `model.safetensors` or `model.safetensors.index.json` and its shards.

    Returns:
        `dict[str, StoredTensor]`: key -> where its bytes lie.

    Raises:
        ConversionError: no safetensors weights, missing shards (all named), or an index that disagrees with them.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return read_header(single)
        if any(folder.glob("*.bin")):
            raise ConversionError(f"{folder} holds *.bin weights; load and save them with transformers as safetensors")
        raise ConversionError(f"{folder} has neither model.safetensors nor {INDEX_NAME}; there are no weights to read")
    weight_map = read_json_mapping(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConversionError(
            f"{index} is not a safetensors index: its weight_map must map keys to file names; download it again"
        )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConversionError(
            f"{len(missing)} of {len(names)} shards are missing in {folder}: {some(missing)}; download them again"
        )
    headers = {name: read_header(folder / name) for name in names}
    absent = [key for key, name in weight_map.items() if key not in headers[name]]
    if absent:
        raise ConversionError(f"{index} names {len(absent)} tensors that its shards lack: {some(absent)}")
    return {key: headers[name][key] for key, name in weight_map.items()}


def mean_row(tensor: StoredTensor, num_rows: int) -> np.ndarray:
    """Mean over the first `num_rows` rows of a stored 2-D floating-point tensor, block by block, in fp64.

    Returns:
        `np.ndarray` of shape `(columns,)`, fp64.
    """
    total = np.zeros(tensor.shape[1])
    for block in row_blocks(tensor, 0, num_rows):
        total += decode(block, tensor.dtype).reshape(-1, tensor.shape[1]).sum(axis=0, dtype=np.float64)
    return total / num_rows


def row_blocks(tensor: StoredTensor, start: int, stop: int) -> Iterator[bytes]:
    """Rows `start` to `stop` of a stored tensor, some whole rows at a time."""
    step = max(1, BLOCK_BYTES // tensor.row_bytes)
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset + start * tensor.row_bytes)
        for first in range(start, stop, step):
            yield _read_exactly(file, (min(first + step, stop) - first) * tensor.row_bytes, tensor.file)


def column_blocks(tensor: StoredTensor, start: int, stop: int) -> Iterator[bytes]:
    """Columns `start` to `stop` of a stored matrix, of some whole rows at a time. Only their pages are read."""
    size, count = ITEM_SIZE[tensor.dtype], tensor.shape[0]
    step = max(1, BLOCK_BYTES // tensor.row_bytes)
    for first in range(0, count, step):
        shape = (min(step, count - first), tensor.row_bytes)
        try:
            mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset + first * tensor.row_bytes, shape)
        except ValueError:
            raise ConversionError(f"{tensor.file} became shorter while it was read; was it changed?") from None
        yield mapped[:, start * size : stop * size].tobytes()


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Floating-point bytes as an fp32 (for F64: fp64) array."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    names = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    if dtype not in names:
        raise ConversionError(f"weights of type {dtype} cannot be averaged or scaled; convert the bf16 checkpoint")
    array = np.frombuffer(data, names[dtype])
    return array.astype(np.float32) if dtype == "F16" else array


def encode(values: np.ndarray, dtype: str) -> bytes:
    """An array as floating-point bytes of `dtype`, rounded to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(values).astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_shard(path: Path, tensors: Iterable[PlannedTensor], on_bytes: Callable[[int], None]) -> None:
    """Write one safetensors file by copying segments in blocks; it appears under its name only when it is complete.

    Args:
        path (`Path`): the file to write. A `.part` sibling is used meanwhile.
        tensors (`Iterable[PlannedTensor]`): what goes in.
        on_bytes (`Callable[[int], None]`): told the number of data bytes after every block.
    """
    # Wide types first, as the safetensors library does: every tensor then starts at a multiple of its item size.
    tensors = sorted(tensors, key=lambda t: (-ITEM_SIZE[t.dtype], t.key))
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for segment in tensor.segments:
                _copy(segment, out, on_bytes)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def _copy(segment: Segment, out, on_bytes: Callable[[int], None]) -> None:
    if segment.blocks is not None:
        for block in segment.blocks():
            out.write(block)
            on_bytes(len(block))
        return
    if segment.file is None:
        out.write(segment.literal)
        on_bytes(segment.num_bytes)
        return
    with open(segment.file, "rb") as source:
        source.seek(segment.offset)
        left = segment.num_bytes
        while left:
            block = _read_exactly(source, min(BLOCK_BYTES, left), segment.file)
            out.write(block)
            on_bytes(len(block))
            left -= len(block)


def _read_exactly(file, size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ConversionError(f"{path} ended {size - len(data)} bytes early while it was read; was it changed?")
    return data


def some(names, limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

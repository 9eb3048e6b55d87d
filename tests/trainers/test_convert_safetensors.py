import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moemb.trainers import convert_safetensors
from moemb.trainers.convert_safetensors import (
    ConversionError,
    PlannedTensor,
    Segment,
    decode,
    encode,
    mean_row,
    read_checkpoint,
    read_header,
    rows,
    whole,
    write_shard,
)


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5).bfloat16(),
        "scale": torch.randn(7),
        "stack": torch.randn(2, 3, 4).half(),
        "scalar": torch.tensor(3.0),
        "counts": torch.arange(5),
    }


@pytest.fixture
def stored(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def test_header_agrees_with_the_safetensors_library(stored, tensors):
    for key, tensor in tensors.items():
        assert stored[key].shape == tuple(tensor.shape)
        data = stored[key].file.read_bytes()[stored[key].offset :][: stored[key].num_bytes]
        assert data == tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else len(data) == 4


def test_copied_shards_load_with_the_safetensors_library(stored, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_safetensors, "BLOCK_BYTES", 7)
    planned = [PlannedTensor(key, t.dtype, t.shape, (whole(t),)) for key, t in stored.items()]
    row = Segment(10, literal=torch.ones(5).bfloat16().view(torch.uint8).numpy().tobytes())
    planned.append(
        PlannedTensor("joined", "BF16", (3, 5), (rows(stored["odd"], 0, 1), row, rows(stored["odd"], 2, 3)))
    )
    seen = []
    write_shard(tmp_path / "copy.safetensors", planned, seen.append)
    copied = load_file(tmp_path / "copy.safetensors")
    for key, tensor in tensors.items():
        assert torch.equal(copied[key], tensor) and copied[key].dtype == tensor.dtype
    assert torch.equal(copied["joined"][1], torch.ones(5).bfloat16())
    assert torch.equal(copied["joined"][::2], tensors["odd"][::2])
    assert sum(seen) == sum(t.num_bytes for t in planned) and max(seen) <= 10
    assert not list(tmp_path.glob("*.part"))


def test_written_tensors_start_at_multiples_of_their_item_size(stored, tmp_path):
    planned = [PlannedTensor(key, t.dtype, t.shape, (whole(t),)) for key, t in stored.items()]
    write_shard(tmp_path / "copy.safetensors", planned, lambda n: None)
    for tensor in read_header(tmp_path / "copy.safetensors").values():
        assert tensor.offset % convert_safetensors.ITEM_SIZE[tensor.dtype] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_and_encode_agree_with_torch(dtype):
    values = torch.cat([torch.randn(4096).double() * 3, torch.tensor([0.0, -0.0, 1e-8, 65000.0], dtype=torch.float64)])
    expected = values.float().to(DTYPES[dtype]) if dtype != "F64" else values
    data = encode(values.float().double().numpy() if dtype != "F64" else values.numpy(), dtype)
    assert data == expected.view(torch.uint8).numpy().tobytes()
    assert np.array_equal(decode(data, dtype), expected.double().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 100, 2**24])
def test_mean_row_is_the_mean_of_the_rows_in_use(tmp_path, monkeypatch, dtype, block):
    monkeypatch.setattr(convert_safetensors, "BLOCK_BYTES", block)
    table = torch.randn(33, 6, dtype=torch.float64).to(DTYPES[dtype])
    save_file({"table": table}, tmp_path / "t.safetensors")
    mean = mean_row(read_header(tmp_path / "t.safetensors")["table"], 31)
    np.testing.assert_allclose(mean, table[:31].double().mean(0).numpy(), rtol=1e-12, atol=1e-15)


def test_an_integer_table_cannot_be_averaged(stored):
    with pytest.raises(ConversionError, match="type I64 cannot be averaged"):
        decode(b"12345678", "I64")


def with_header(change):
    """Damage that replaces the header: `change` gets the parsed one and returns what is written."""

    def damage(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return damage


def with_entry(**values):
    return with_header(lambda header: header | {"odd": header["odd"] | values})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_header(list), "header that is a list, not a mapping"),
        (with_header(lambda header: header | {"odd": 3}), "entry of 'odd' in .* is 3, not a mapping"),
        (with_header(lambda header: header | {"odd": {}}), "'odd' in .* has the type None"),
        (with_entry(dtype=["F16"]), r"'odd' in .* has the type \['F16'\]"),
        (with_entry(shape=None), "'odd' in .* has the shape None"),
        (with_entry(shape=[-3, -5]), r"'odd' in .* has the shape \[-3, -5\]"),
        (with_entry(shape=[3, "5"]), r"'odd' in .* has the shape \[3, '5'\]"),
        (with_entry(data_offsets=[0]), r"'odd' in .* has data_offsets \[0\]"),
        (with_entry(data_offsets="ab"), "'odd' in .* has data_offsets 'ab'"),
        (with_entry(data_offsets=[-30, 0]), r"'odd' in .* has data_offsets \[-30, 0\]"),
        (with_entry(data_offsets=[30, 0]), r"'odd' in .* has data_offsets \[30, 0\]"),
        (with_entry(data_offsets=[0.0, 30.0]), r"'odd' in .* has data_offsets \[0.0, 30.0\]"),
        (with_entry(data_offsets=[900, 930]), "is cut short: .* bytes promised"),
        (with_entry(data_offsets=[0, 30]), "'counts' and 'odd' overlap|'odd' and 'counts' overlap"),
        (lambda data: data.replace(b"odd", b"\xff\xfe\xfd"), "unreadable safetensors header"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (lambda data: data[:-4], "is cut short: .* bytes promised"),
        (lambda data: data[:100], "is not a safetensors file or is cut short"),
        (lambda data: b"", "is not a safetensors file or is cut short"),
        (lambda data: data[:8] + b"x" + data[9:], "unreadable safetensors header"),
        (lambda data: b"\xff" * 8 + data[8:], "is not a safetensors file or is cut short"),
        (lambda data: data.replace(b'"F16"', b'"F32"'), "promises .* but holds"),
        (lambda data: data.replace(b'"F16"', b'"X16"'), "type X16, which the converter does not know"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(stored, damage, message):
    path = stored["odd"].file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConversionError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_missing_shards_are_all_named(tensors, tmp_path):
    save_file(tensors, tmp_path / "a.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors", "y": "c.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConversionError, match=r"2 of 3 shards are missing in .*: b.safetensors, c.safetensors"):
        read_checkpoint(tmp_path)
    save_file({"z": torch.zeros(1)}, tmp_path / "b.safetensors")
    save_file({"y": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ConversionError, match="names 1 tensors that its shards lack: x"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is not a safetensors index: its weight_map must map keys to file names"),
        (b'{"weight_map": ["a.safetensors"]}', "is not a safetensors index"),
        (b'{"weight_map": {"x": 3}}', "is not a safetensors index"),
        (b'{"weight_map": {"x": ["a"]}}', "is not a safetensors index"),
        (b"[]", "holds a list, not a JSON object"),
        (b"{", "is not JSON"),
        (b'{"\xff": 1}', "is not JSON: 'utf-8' codec"),
    ],
)
def test_a_damaged_index_is_named_with_what_is_wrong(tmp_path, content, message):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    with pytest.raises(ConversionError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert str(index) in str(caught.value)


def test_folders_without_safetensors_weights(tmp_path):
    with pytest.raises(ConversionError, match="no weights to read"):
        read_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConversionError, match="save them with transformers as safetensors"):
        read_checkpoint(tmp_path)

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemb.trainers.convert_plan import (
    EMBEDDING_KEY,
    base_keys,
    check_against_model,
    pack_experts,
    split_into_shards,
    with_emb_row,
)
from moemb.trainers.convert_safetensors import ConversionError, PlannedTensor, Segment, read_header, whole, write_shard


EXPERTS = "language_model.layers.10.mlp.experts"


def stored(tmp_path: Path, tensors: dict[str, torch.Tensor]):
    save_file(tensors, tmp_path / "source.safetensors")
    return read_header(tmp_path / "source.safetensors")


def written(tmp_path: Path, planned) -> dict[str, torch.Tensor]:
    write_shard(tmp_path / "written.safetensors", planned, lambda n: None)
    return load_file(tmp_path / "written.safetensors")


def one_by_one(count: int = 11) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gate_proj": (3, 4), "up_proj": (3, 4), "down_proj": (4, 3)}
    return {f"{EXPERTS}.{i}.{n}.weight": torch.randn(s) for i in range(count) for n, s in shapes.items()}


def test_keys_lose_their_model_prefix_and_unused_parts_go(tmp_path):
    names = ["model.language_model.norm.weight", "model.visual.pos_embed.weight", "lm_head.weight", "mtp.fc.weight"]
    tensors = stored(tmp_path, {name: torch.zeros(1) for name in names})
    assert sorted(base_keys(tensors)) == ["language_model.norm.weight", "visual.pos_embed.weight"]
    base = stored(tmp_path, {"language_model.norm.weight": torch.zeros(1)})
    assert list(base_keys(base)) == ["language_model.norm.weight"]


def test_strange_keys_are_refused_and_named(tmp_path):
    with pytest.raises(ConversionError, match="1 keys belong to no part of a Qwen3.5-MoE model: model.layers.0.x"):
        base_keys(stored(tmp_path, {"model.layers.0.x": torch.zeros(1)}))


def test_experts_are_stacked_in_numeric_order_gate_over_up(tmp_path):
    tensors = one_by_one()
    packed = written(tmp_path, pack_experts(stored(tmp_path, tensors)))
    assert sorted(packed) == [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]
    assert packed[f"{EXPERTS}.gate_up_proj"].shape == (11, 6, 4)
    for i in range(11):
        both = torch.cat([tensors[f"{EXPERTS}.{i}.{name}.weight"] for name in ("gate_proj", "up_proj")])
        assert torch.equal(packed[f"{EXPERTS}.gate_up_proj"][i], both)
        assert torch.equal(packed[f"{EXPERTS}.down_proj"][i], tensors[f"{EXPERTS}.{i}.down_proj.weight"])


def test_an_expert_without_a_part_and_one_of_another_shape_are_named(tmp_path):
    tensors = one_by_one()
    del tensors[f"{EXPERTS}.4.up_proj.weight"]
    with pytest.raises(ConversionError, match=r"1 keys are missing: .*experts\.4\.up_proj\.weight"):
        pack_experts(stored(tmp_path, tensors))
    tensors = one_by_one()
    tensors[f"{EXPERTS}.4.up_proj.weight"] = torch.zeros(3, 5)
    with pytest.raises(ConversionError, match=r"4\.up_proj\.weight' is \(3, 5\) F32, but the experts beside it"):
        pack_experts(stored(tmp_path, tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("emb", "size"), [(7, 10), (9, 10), (0, 10), (10, 11), (12, 13)])
def test_emb_row_is_the_mean_of_the_rows_in_use_plus_noise(tmp_path, dtype, emb, size):
    table = torch.randn(10, 64).to(dtype) + 1
    tensors = stored(tmp_path, {EMBEDDING_KEY: table})
    planned = [PlannedTensor(EMBEDDING_KEY, t.dtype, t.shape, (whole(t),)) for t in tensors.values()]
    new = written(tmp_path, with_emb_row(planned, tensors[EMBEDDING_KEY], emb, used_rows=7, seed=3))[EMBEDDING_KEY]
    assert new.shape == (size, 64)
    kept = [row for row in range(10) if row != emb]
    assert torch.equal(new[kept], table[kept])
    noise = new[emb].double() - table[:7].double().mean(0)
    assert noise.abs().max() < (5e-3 if dtype == torch.float32 else 2e-2) and noise.any()
    if dtype == torch.float32:
        assert 5e-4 < noise.std() < 2e-3
    again = with_emb_row(planned, tensors[EMBEDDING_KEY], emb, used_rows=7, seed=3)
    other = with_emb_row(planned, tensors[EMBEDDING_KEY], emb, used_rows=7, seed=4)
    assert torch.equal(written(tmp_path, again)[EMBEDDING_KEY], new)
    assert not torch.equal(written(tmp_path, other)[EMBEDDING_KEY], new)


def test_what_does_not_fit_the_model_is_named():
    def plan(**shapes):
        return [PlannedTensor(key, "F32", shape, ()) for key, shape in shapes.items()]

    check_against_model(plan(a=(1,), b=(2,)), {"a": (1,), "b": (2,)})
    with pytest.raises(ConversionError, match="lacks 1 keys that its config.json asks for: b"):
        check_against_model(plan(a=(1,)), {"a": (1,), "b": (2,)})
    with pytest.raises(ConversionError, match="has 1 keys that its config.json has no place for: b"):
        check_against_model(plan(a=(1,), b=(2,)), {"a": (1,)})
    with pytest.raises(ConversionError, match=r"1 tensors do not fit config.json: a is \(3,\), not \(1,\)"):
        check_against_model(plan(a=(3,)), {"a": (1,)})


def test_shards_hold_what_they_may_in_layer_order():
    def plan(key, size):
        return PlannedTensor(key, "U8", (size,), (Segment(size, literal=b"\0" * size),))

    planned = [plan("layers.10.a", 40), plan("layers.2.a", 40), plan("layers.2.b", 70), plan("embed", 200)]
    shards = split_into_shards(planned, 100)
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert list(shards) == names
    keys = [[tensor.key for tensor in shards[name]] for name in names]
    assert keys == [["embed"], ["layers.2.a"], ["layers.2.b"], ["layers.10.a"]]
    assert list(split_into_shards(planned, 1000)) == ["model.safetensors"]

import json
import shutil

import pytest
import torch

from modeling_moemb import MoEMBModel
from modeling_moemb.linear_moemb import MoEMBLinear
from moemb.trainers import lora
from moemb.trainers.contrastive_checkpoint import AdapterError, merge_adapter
from moemb.trainers.lora import (
    TrainableError,
    check_trainable,
    count_parameters,
    merged_model,
    portable_name,
    prepare_trainable,
    save_adapter,
    trainable_table,
)

from .contrastive_runs import config, small_repository, trainer, write_data


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    return small_repository(tmp_path_factory.mktemp("lora") / "tiny", tiny_settings)


def settings(tmp_path, repository, **changes):
    return config(tmp_path, repository, {"d": {"path": "json"}}, **changes)


def prepared(tmp_path, repository, **changes):
    model = MoEMBModel.from_pretrained(repository)
    prepare_trainable(model, settings(tmp_path, repository, **changes))
    return model


def trained(model):
    return {label: count.trained for label, count in count_parameters(model).items() if count.trained}


def test_adapters_stand_where_the_paper_has_them(tmp_path, repository):
    model = prepared(tmp_path, repository)
    # hidden 64: Gated DeltaNet (qkv 64->160, z 64->96, out 96->64), attention q 64->256, k and v 64->64, o 128->64
    rank = 4
    gated = rank * ((64 + 160) + (64 + 96) + (96 + 64))
    attention = rank * ((64 + 256) + 2 * (64 + 64) + (128 + 64))
    shared = 2 * rank * 3 * (64 + 32)
    assert trained(model) == {
        "gated delta": gated, "attention": attention, "shared expert": shared, "embeddings": 64,
    }  # fmt: skip
    total = sum(p.numel() for n, p in model.named_parameters() if not lora.is_adapter(n))
    assert sum(count.total for count in count_parameters(model).values()) == total


def test_adapters_run_on_the_kernel_of_the_layers_beside_them(tmp_path, repository):
    """torch would compile a product for every number of rows, and keep it: memory grew with every chunk."""
    model = prepared(tmp_path, repository)
    factors = [
        m for name, m in model.named_modules() if name.endswith((f"lora_A.{lora.ADAPTER}", f"lora_B.{lora.ADAPTER}"))
    ]
    assert len(factors) == 26 and all(type(factor) is MoEMBLinear for factor in factors)


def test_routed_experts_have_a_rank_of_their_own(tmp_path, repository):
    model = prepared(tmp_path, repository, lora_expert_rank=2, lora_targets=["attention"])
    experts = 2 * 8 * 2 * ((64 + 64) + (32 + 64))
    assert trained(model)["routed experts"] == experts and "gated delta" not in trained(model)
    wrapper = model.language_model.layers[0].mlp.experts
    assert wrapper.r["default"] == 2 and wrapper.scaling["default"] == pytest.approx(8 / 4)


def test_router_and_row_of_emb_are_choices(tmp_path, repository):
    model = prepared(tmp_path, repository, train_router=True, train_emb_token=False)
    assert trained(model)["router"] == 2 * (8 * 64 + 64) and "embeddings" not in trained(model)


def test_full_tuning_freezes_router_and_vision_tower(tmp_path, repository):
    model = prepared(tmp_path, repository, tuning="full")
    frozen = {label for label, count in count_parameters(model).items() if not count.trained}
    assert frozen == {"router", "vision tower"}
    everything = prepared(tmp_path, repository, tuning="full", train_router=True, train_vision=True)
    assert all(count.trained == count.total for count in count_parameters(everything).values())


def test_anything_else_that_would_be_trained_is_an_error(tmp_path, repository):
    model = prepared(tmp_path, repository)
    args = settings(tmp_path, repository)
    check_trainable(model, args)
    model.language_model.norm.weight.requires_grad_(True)
    with pytest.raises(TrainableError, match="norms: 64 instead of 0"):
        check_trainable(model, args)
    model.language_model.norm.weight.requires_grad_(False)
    model.language_model.layers[0].linear_attn.out_proj.lora_A.default.weight.requires_grad_(False)
    with pytest.raises(TrainableError, match="gated delta"):
        check_trainable(model, args)


def test_experts_that_a_library_passes_over_are_noticed(tmp_path, repository, monkeypatch):
    monkeypatch.setattr(lora, "lora_config", lambda m, a, make=lora.lora_config: _without_experts(make(m, a)))
    with pytest.raises(TrainableError, match="routed experts: 0 instead of"):
        prepared(tmp_path, repository, lora_expert_rank=2)


def _without_experts(made):
    made.target_parameters = None
    return made


def test_the_table_names_every_component(tmp_path, repository):
    table = trainable_table(prepared(tmp_path, repository)).splitlines()
    labels = {line[:24].strip() for line in table[1:-2]}
    assert labels == {
        "attention", "convolutions", "decay and write strength", "embeddings", "gated delta", "norms",
        "routed experts", "router", "shared expert", "vision tower",
    }  # fmt: skip
    assert table[-1].startswith("trained:")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, repository):
    """An adapter of every kind with weights other than zero, and the model that has it."""
    folder = tmp_path_factory.mktemp("adapter")
    data = write_data(folder / "data")
    run = trainer(folder / "run", repository, data, lora_expert_rank=2, train_router=True, save_merged=False)
    with torch.no_grad():
        for parameter in run.trained:
            parameter.add_(0.05 * torch.randn_like(parameter))
    return run.export_final(), run.backbone.eval()


IDS = torch.tensor([[5, 6, 7, 8, 9]])


def vector(model):
    ids = torch.cat([IDS, torch.tensor([[model.config.emb_token_id]])], dim=1)
    with torch.no_grad():
        return model(input_ids=ids, pooled_only=True).pooler_output


def test_merged_weights_give_the_adapters_vectors(adapter, repository):
    folder, model = adapter
    merged = merged_model(repository, folder)
    base = MoEMBModel.from_pretrained(repository).eval()
    assert not any(lora.is_adapter(name) for name, _ in merged.named_parameters())
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert torch.allclose(vector(merged), vector(model), atol=1e-4)
    assert not torch.allclose(vector(base), vector(model), atol=1e-2)


def test_a_moved_adapter_loads_and_names_no_folder(adapter, repository, tmp_path):
    folder, model = adapter
    moved = tmp_path / "elsewhere" / "mine"
    shutil.copytree(folder, moved)
    for file in moved.glob("*.json"):
        assert "/" not in file.read_text().replace("dot_natural/", ""), file.name
    assert json.loads((moved / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    from peft import PeftModel

    by_peft = PeftModel.from_pretrained(MoEMBModel.from_pretrained(repository), str(moved)).eval()
    by_transformers = MoEMBModel.from_pretrained(repository)
    by_transformers.load_adapter(str(moved))
    for loaded in (by_peft.base_model.model, by_transformers.eval()):
        assert torch.allclose(vector(loaded), vector(model), atol=1e-6)


def test_an_adapter_merges_into_its_own_base_alone(adapter, repository, tmp_path, tiny_settings):
    folder, model = adapter
    target = merge_adapter(repository, folder, tmp_path / "merged")
    assert (target / "modules.json").is_file()
    assert torch.allclose(vector(MoEMBModel.from_pretrained(target)), vector(model), atol=1e-4)
    other = small_repository(tmp_path / "other", tiny_settings, seed=1)
    with pytest.raises(AdapterError, match="was trained on tiny"):
        merge_adapter(other, folder, tmp_path / "never")


def test_an_adapter_of_other_settings_is_refused(adapter, repository, tmp_path):
    model = prepared(tmp_path, repository, lora_expert_rank=2, train_router=True, lora_targets=["attention"])
    with pytest.raises(TrainableError, match="does not fit"):
        lora.load_adapter_weights(model, adapter[0])


def test_names_lose_the_folders_of_this_machine(tmp_path, repository):
    assert portable_name("Qwen/Qwen3.5-35B-A3B") == "Qwen/Qwen3.5-35B-A3B"
    assert portable_name(str(repository)) == "tiny" and portable_name("moemb-mini") == "moemb-mini"
    save_adapter(prepared(tmp_path, repository), tmp_path / "saved", "some/where")
    assert (
        json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/where"
    )

"""What cannot be trained with spread weights is refused before anything is loaded; what is spread keeps its names."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Qwen3_5MoeTextConfig

from modeling_moemb import MoEMBConfig
from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.distributed import (
    DistributedError,
    check_architecture,
    distributed_kwargs,
    gather_adapters,
    is_spread,
    loading_for_adapters,
    mesh_of,
    whole,
)
from moemb.trainers.optimizer import MasterAdamW

from .contrastive_runs import config


BOTH = {"fsdp_size": 4, "ep_size": 4}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Makes settings as one of four processes sees them."""
    monkeypatch.setattr(ContrastiveConfig, "world_size", 4)
    return lambda **changes: config(tmp_path, Path("anywhere"), {"pairs": {}}, **changes)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "advice"),
        [
            ({"distributed": {"fsdp_size": 2}}, "fsdp_size is 2, but there are 4 processes"),
            ({"distributed": {"ep_size": 4}}, "fsdp_size is None, but there are 4 processes"),
            ({"distributed": {"fsdp_size": 4, "ep_size": 3}}, "ep_size=3 must divide the 4 processes"),
            ({"distributed": {"fsdp_size": 4, "tp_size": 2}}, "names 'tp_size'"),
            ({"distributed": {"fsdp_size": "4"}}, "a size is a whole number of processes"),
            ({"distributed": {"fsdp_size": 4, "ep_size": 0}}, "a size is a whole number of processes"),
            ({"distributed": BOTH, "lora_expert_rank": 2}, "Set lora_expert_rank: 0"),
            ({"distributed": {"fsdp_size": 4}, "lora_expert_rank": 2}, "leave distributed out (DDP)"),
            ({"distributed": BOTH, "tuning": "full", "train_vision": True}, "Set train_vision: false"),
            ({"distributed": BOTH, "tuning": "full"}, "save_only_model: true with continue_run: false"),
            ({"distributed": BOTH, "tuning": "full", "save_only_model": True}, "with continue_run: false"),
            ({"distributed": BOTH, "eval_datasets": {"pairs": {}}, "eval_strategy": "steps"}, "on final/ afterwards"),
            (
                {
                    "distributed": BOTH,
                    "gradient_checkpointing": True,
                    "gradient_checkpointing_kwargs": {"use_reentrant": True},
                },
                "use_reentrant: true with distributed",
            ),
        ],
    )
    def test_settings(self, settings, changes, advice):
        with pytest.raises(ValueError, match=re.escape(advice)):
            settings(**changes)

    def test_fsdp_of_accelerate(self, settings, monkeypatch):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match=re.escape("distributed: {fsdp_size: 4}")):
            settings()

    def test_what_is_possible(self, settings):
        assert settings().distributed is None
        assert settings(distributed={"fsdp_size": 4}).distributed == {"fsdp_size": 4, "ep_size": 1}
        full = settings(distributed=BOTH, tuning="full", save_only_model=True, continue_run=False)
        assert full.distributed == BOTH
        given = distributed_kwargs(full)["distributed_config"]
        assert (given.fsdp_size, given.ep_size, given.tp_size, given.pp_size) == (4, 4, 1, 1)
        assert distributed_kwargs(settings()) == {}

    def test_one_process_has_nothing_to_spread_over(self, tmp_path):
        with pytest.raises(ValueError, match="there are 1 processes"):
            config(tmp_path, Path("anywhere"), {"pairs": {}}, distributed={"fsdp_size": 1})


class TestArchitecture:
    def test_experts_that_cannot_be_shared_out(self, settings, tiny_settings):
        six = tiny_settings["text_config"] | {"num_experts": 6}
        with pytest.raises(DistributedError, match="ep_size=4 does not divide the model's 6 experts"):
            check_architecture(MoEMBConfig(**tiny_settings | {"text_config": six}), settings(distributed=BOTH))
        check_architecture(
            MoEMBConfig(**tiny_settings | {"text_config": six}), settings(distributed={"fsdp_size": 4, "ep_size": 2})
        )

    def test_a_model_without_routed_experts(self, settings, tiny_settings):
        fixed = {"num_experts": 1, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0}
        dense = tiny_settings | {"text_config": tiny_settings["text_config"] | fixed, "feed_forward": "dense"}
        with pytest.raises(DistributedError, match="no routed experts to share out"):
            check_architecture(MoEMBConfig(**dense), settings(distributed=BOTH))
        check_architecture(MoEMBConfig(**dense), settings(distributed={"fsdp_size": 4}))

    def test_a_compute_budget(self, settings, tiny_settings):
        model = MoEMBConfig(**tiny_settings, adaptive_compute={"top_k": 1})
        with pytest.raises(DistributedError, match="skipped experts cannot travel"):
            check_architecture(model, settings(distributed=BOTH))


def test_the_table_is_with_the_rest_while_a_model_is_loaded_for_adapters(settings):
    before = dict(Qwen3_5MoeTextConfig.base_model_fsdp_plan)
    assert "embed_tokens" in before
    with loading_for_adapters(settings(distributed=BOTH)):
        assert Qwen3_5MoeTextConfig.base_model_fsdp_plan == {k: v for k, v in before.items() if k != "embed_tokens"}
    assert "base_model_fsdp_plan" not in vars(Qwen3_5MoeTextConfig)
    with loading_for_adapters(settings()):
        assert Qwen3_5MoeTextConfig.base_model_fsdp_plan == before


@pytest.fixture
def mesh(tmp_path):
    """One process that takes itself for a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_adapters_are_gathered_and_other_weights_are_not(mesh):
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(4, 4), "extra": torch.nn.Linear(4, 4)})
    for module in model.values():
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    value = whole(model["extra"].weight.data).clone()
    gather_adapters(model, ["extra.weight", "extra.bias"])
    assert not is_spread(model["extra"].weight) and is_spread(model["base"].weight)
    assert torch.equal(model["extra"].weight, value)


def test_the_optimizer_steps_spread_and_whole_weights_as_it_does_plain_ones(mesh):
    """Two meshes' worth of weights: the same norm, the same clipping, the same step."""
    torch.manual_seed(0)
    values, gradients = [torch.randn(6, 3) for _ in range(3)], [torch.randn(6, 3) for _ in range(3)]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    spread = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values[:2]]
    spread.append(torch.nn.Parameter(values[2].clone()))
    for parameters in (plain, spread):
        for parameter, gradient in zip(parameters, gradients):
            sharded = is_spread(parameter)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient.clone()
    reference = MasterAdamW([{"params": plain}], lr=0.1)
    optimizer = MasterAdamW([{"params": spread[:2]}, {"params": spread[2:]}], lr=0.1)
    assert [mesh_of(master) is None for master in optimizer.masters] == [False, False, True]
    assert torch.allclose(optimizer.clip_gradients(0.5), reference.clip_gradients(0.5))
    reference.step()
    optimizer.step()
    for one, two, value in zip(plain, spread, values):
        assert torch.allclose(one, whole(two.data), atol=1e-6)
        assert not torch.equal(whole(two.data), value)
    optimizer.load_state_dict(optimizer.state_dict())
    assert isinstance(optimizer.masters[0].data, DTensor)

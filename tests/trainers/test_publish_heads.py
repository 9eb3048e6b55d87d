"""Heads filled up with zeros compute what they computed before, in transformers' own model."""

import copy

import pytest
import torch
from transformers import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeModel,
    Qwen3_5MoeRMSNorm,
)

from moemb.trainers.convert_safetensors import read_checkpoint, write_shard
from moemb.trainers.publish_heads import HEAD_SIZE, needs_wider_heads, widen, widened_config


@pytest.mark.parametrize(("key", "value"), [(16, 24), (64, 32), (128, 32), (100, 128)])
def test_the_same_function(tmp_path, tiny_settings, key, value):
    settings = copy.deepcopy(tiny_settings)
    settings["text_config"] |= {"linear_key_head_dim": key, "linear_value_head_dim": value}
    torch.manual_seed(0)
    model = Qwen3_5MoeModel(Qwen3_5MoeConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
    model.save_pretrained(tmp_path / "narrow", save_original_format=False)
    config = model.config
    planned = widen(read_checkpoint(tmp_path / "narrow"), config)
    (tmp_path / "wide").mkdir()
    write_shard(tmp_path / "wide" / "model.safetensors", planned, lambda count: None)
    widened_config(config).save_pretrained(tmp_path / "wide")
    wide = Qwen3_5MoeModel.from_pretrained(tmp_path / "wide").eval()
    assert wide.config.text_config.linear_key_head_dim == HEAD_SIZE
    ids = torch.randint(0, 280, (2, 19))
    with torch.no_grad():
        before, shared = model(input_ids=ids).last_hidden_state, wide(input_ids=ids).last_hidden_state
        for module in wide.modules():  # the states of a random model are small enough to feel the others' epsilon
            if isinstance(module, Qwen3_5MoeRMSNorm):
                module.eps = config.text_config.rms_norm_eps
        after = wide(input_ids=ids).last_hidden_state
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)
    assert torch.nn.functional.cosine_similarity(shared, before, dim=-1).min() > 0.9999


def test_only_smaller_heads_are_filled_up(tiny_settings):
    assert needs_wider_heads(Qwen3_5MoeConfig(**tiny_settings))
    assert not needs_wider_heads(Qwen3_5MoeConfig()), "Qwen3.5's own"
    assert not needs_wider_heads(widened_config(Qwen3_5MoeConfig(**tiny_settings)))

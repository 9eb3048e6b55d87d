"""What users may rely on. A change here is a change for them: note it in CHANGELOG.md."""

import inspect

import pytest
from transformers import AutoConfig, Qwen3_5MoeConfig
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import modeling_moemb
from moemb.trainers import cli


PUBLIC = [
    "MoEMBConfig",
    "MoEMBModel",
    "MoEMBOutput",
    "MoEMBPreTrainedModel",
    "MoEMBProcessor",
    "kernels_report",
    "use_kernels",
    "validate_adaptive_compute",
]


def test_names_of_the_model_room():
    assert sorted(modeling_moemb.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    documented = inspect.getdoc(getattr(modeling_moemb, name))
    assert documented and not documented.startswith(f"{name}(")


def test_verbs():
    assert list(cli.VERBS) == [
        "data",
        "train",
        "plan",
        "evaluate",
        "bench",
        "convert",
        "merge",
        "prune-experts",
        "calibrate",
        "analyze",
        "ablate",
        "study",
        "encode",
        "serving",
        "publish",
        "kernels",
        "quickstart",
        "app",
    ]


def test_model_type_and_ancestry():
    assert modeling_moemb.MoEMBConfig.model_type == "moemb"
    assert issubclass(modeling_moemb.MoEMBConfig, Qwen3_5MoeConfig)
    assert issubclass(modeling_moemb.MoEMBProcessor, Qwen3VLProcessor)


def test_importing_the_package_registers_the_auto_classes(tmp_path, tiny_config):
    tiny_config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is modeling_moemb.MoEMBConfig


def test_forward_takes_what_the_documentation_names():
    parameters = inspect.signature(modeling_moemb.MoEMBModel.forward).parameters
    promised = {
        "input_ids",
        "attention_mask",
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "mm_token_type_ids",
        "inputs_embeds",
        "output_router_logits",
        "pooled_only",
        "packed_hidden",
        "adaptive_compute",
    }
    assert promised <= set(parameters)

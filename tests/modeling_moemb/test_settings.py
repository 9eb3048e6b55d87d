"""Settings of the compute dial: wrong ones are errors when they are set or loaded, right ones survive JSON."""

import json

import pytest

from modeling_moemb import MoEMBConfig

from ..conftest import EMB_ID
from .budgets import BUDGETS, KEEP_ALL


PRUNING = {"layer": 4, "keep": 0.5}
WRONG = [
    ({"topk": 1}, r"unknown `adaptive_compute` keys \['topk'\]; known keys: \['top_k'"),
    ({"top_k": 0}, r"\['top_k'\]` must be an integer from 1 to 2 .*got 0"),
    ({"random_k": 3}, r"\['random_k'\]` must be an integer from 1 to 2 .*got 3"),
    ({"seed": -1}, r"\['seed'\]` must be an integer from 0"),
    ({"per_modality": {"pdf": 1}}, r"unknown `adaptive_compute\['per_modality'\]` keys \['pdf'\]; known .*'image'"),
    ({"per_modality": {"image": 0}}, r"\['per_modality'\]\['image'\]` must be an integer from 1 to 2"),
    ({"per_modality": 1}, r"\['per_modality'\]` must be a dict with keys among"),
    ({"tiered_top_k": {"layer": 3}}, r"\['tiered_top_k'\]` lacks \['min'\]"),
    ({"tiered_top_k": {"layer": 8, "min": 1}}, r"\['tiered_top_k'\]\['layer'\]` must be an integer from 1 to 7"),
    ({"tiered_top_k": {"layer": 3, "min": 3}}, r"\['tiered_top_k'\]\['min'\]` must be an integer from 1 to 2"),
    ({"modes": {}}, r"\['modes'\]` lacks \['tau'\]"),
    ({"modes": {"tau": -0.1}}, r"\['modes'\]\['tau'\]` must be a finite number of at least 0, got -0.1"),
    ({"modes": {"tau": float("nan")}}, r"\['tau'\]` must be a finite number"),
    ({"modes": {"tau": {"image": -1}}}, r"\['tau'\]\['image'\]` must be a finite number of at least 0"),
    ({"modes": {"tau": {"page": 1}}}, r"unknown `adaptive_compute\['modes'\]\['tau'\]` keys \['page'\]"),
    ({"modes": {"tau": 0.1, "scales": []}}, r"unknown `adaptive_compute\['modes'\]` keys \['scales'\]"),
    ({"modes": {"tau": 0.1, "layer_scales": [1] * 7}}, r"\['layer_scales'\]` must be a list of 8 numbers"),
    ({"modes": {"tau": 0.1, "layer_scales": [1] * 7 + [-1]}}, r"\['layer_scales'\]\[7\]` must be a finite number"),
    ({"modes": {"tau": 0.1, "layer_scales": {"text": [1] * 8}}}, r"\['layer_scales'\]` lacks \['image', 'video'\]"),
    ({"modes": {"tau": 0.1, "min_experts": 3}}, r"\['min_experts'\]` must be an integer from 0 to 2"),
    ({"modes": {"tau": 0.1, "renormalise": 1}}, r"\['renormalise'\]` must be true or false, got 1"),
    ({"token_pruning": 0.5}, r"\['token_pruning'\]` must be a dict"),
    ({"token_pruning": {"keep": 0.5}}, r"\['token_pruning'\]` lacks \['layer'\]"),
    ({"token_pruning": PRUNING | {"keep": 0}}, r"\['keep'\]` must be a number above 0 and at most 1, got 0"),
    ({"token_pruning": PRUNING | {"keep": 1.01}}, r"\['keep'\]` must be a number above 0 and at most 1, got 1.01"),
    ({"token_pruning": PRUNING | {"keep": True}}, r"\['keep'\]` must be a number above 0"),
    ({"token_pruning": PRUNING | {"keep": {"text": 0.5}}}, r"\['keep'\]` keys \['text'\]; known keys: \['image'"),
    ({"token_pruning": PRUNING | {"layer": 0}}, r"\['layer'\]` must be an integer from 1 to 7 .*got 0"),
    ({"token_pruning": PRUNING | {"layer": 8}}, r"\['layer'\]` must be an integer from 1 to 7 .*got 8"),
    ({"token_pruning": PRUNING | {"budget": 5}}, r"exactly one of 'keep' .* and 'budget'"),
    ({"token_pruning": {"layer": 4}}, r"exactly one of 'keep' .* and 'budget'"),
    ({"token_pruning": {"layer": 4, "budget": 0}}, r"\['budget'\]` must be an integer from 1"),
    ({"token_pruning": PRUNING | {"scope": "page"}}, r"\['scope'\]` must be one of \['item', 'image'\], got 'page'"),
    ({"token_pruning": PRUNING | {"score": "alpha"}}, r"\['score'\]` must be one of \['beta', 'attention'"),
    ({"token_pruning": PRUNING | {"layer": 3, "score": "attention"}}, r"\['layer'\]` must be from 4 to 7: .*full_att"),
    (
        {"token_pruning": PRUNING | {"modalities": ["text"]}},
        r"\['modalities'\]` must be a list of 'image' and 'video'",
    ),
    ({"token_pruning": PRUNING | {"modalities": []}}, r"\['modalities'\]` must be a list"),
    (
        {"token_pruning": {"layer": 4, "keep": {"image": 0.5}, "modalities": ["image"]}},
        r"\['modalities'\]` must be left out when 'keep' names the modalities",
    ),
]


@pytest.mark.parametrize(("budget", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_wrong_settings_are_refused_at_load_time(tiny_settings, tiny_config, tiny_model, budget, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID, adaptive_compute=budget)
    with pytest.raises(ValueError, match=message):
        tiny_model.set_adaptive_compute(budget)
    tiny_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"adaptive_compute": budget}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        MoEMBConfig.from_pretrained(tmp_path)


def test_settings_must_be_a_mapping(tiny_model):
    with pytest.raises(TypeError, match="must be a dict or None, got list"):
        tiny_model.set_adaptive_compute([1])


@pytest.mark.parametrize("name", BUDGETS | KEEP_ALL)
def test_valid_settings_survive_json_and_a_second_check(tiny_settings, name, tmp_path):
    budget = (BUDGETS | KEEP_ALL)[name]
    config = MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID, adaptive_compute=budget)
    config.save_pretrained(tmp_path)
    assert MoEMBConfig.from_pretrained(tmp_path).adaptive_compute == budget == config.adaptive_compute

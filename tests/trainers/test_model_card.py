import json

import pytest
import yaml
from transformers import Qwen3_5MoeConfig

from modeling_moemb import MoEMBModel
from moemb.trainers.model_card import card_text, count_parameters, human, license_of


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_counts_are_those_of_the_model(tiny_config, tiny_model):
    counts = count_parameters(tiny_config)
    assert counts["total"] == sum(p.numel() for p in MoEMBModel(tiny_config).parameters())
    text = tiny_config.text_config
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    assert counts["routed_experts"] == text.num_hidden_layers * text.num_experts * expert
    assert counts["embedding_table"] == text.vocab_size * text.hidden_size
    idle = text.num_hidden_layers * (text.num_experts - text.num_experts_per_tok) * expert
    assert counts["active"] == counts["total"] - counts["vision"] - counts["embedding_table"] - idle


def test_counts_of_the_35b_model_need_no_memory():
    """The default configuration is Qwen3.5-35B-A3B: 34.66 B text parameters, of them 2.44 B active in the decoder."""
    counts = count_parameters(Qwen3_5MoeConfig())
    assert counts["active"] == pytest.approx(2.44e9, rel=0.01)
    # the known count of the text model includes an output head as large as the embedding table
    text_model = counts["total"] - counts["vision"] + counts["embedding_table"]
    assert text_model == pytest.approx(34.66e9, rel=0.001)


def test_card_of_a_converted_model(tiny_config):
    card = card_text(tiny_config, name="moemb-tiny", base_model="org/base", license="apache-2.0")
    header = header_of(card)
    assert header["base_model"] == "org/base" and header["license"] == "apache-2.0"
    assert header["pipeline_tag"] == "sentence-similarity"
    assert 'SentenceTransformer("moemb-tiny", trust_remote_code=True)' in card
    assert "8: 6 Gated DeltaNet, 2 full attention" in card and "8 routed, 2 per token" in card
    assert human(count_parameters(tiny_config)["total"]) in card
    assert "freshly initialised" in card and "No evaluation of this repository has been run." in card
    assert "$" not in card


def test_a_trained_card_tells_its_numbers_from_the_file(tiny_config, tmp_path):
    entry = {"value": 0.25, "interval": [0.2, 0.3]}
    line = {
        "line": "all",
        "queries": 165,
        "pool": [1914, 1914],
        "chance": {"R@1": 0.0005, "R@10": 0.005},
        "systems": [
            {"name": "moemb-mini", "ablation": False, "note": "", "R@1": entry, "R@10": entry, "nDCG@10": entry}
        ],
        "verdict": {"above_chance": True, "above_baselines": None, "not_above": []},
    }
    report = tmp_path / "evaluation.json"
    report.write_text(json.dumps({"tasks": [{"number": "2", "name": "emoji-concept", "lines": [line]}]}))
    card = card_text(tiny_config, name="x", evaluation=report, trained=True, limits=["Drawings only."])
    assert "| 2 | emoji-concept | all | 165 x 1914 | 25.0 (20.0–30.0)" in card
    assert "freshly initialised" not in card and "- Drawings only." in card


def test_recorded_conventions_are_listed(tiny_config):
    tiny_config.embedding = {"prompts": {"query": "Find: "}, "bare_frames_fps": 24.0}
    card = card_text(tiny_config, name="x")
    tiny_config.embedding = None
    assert '- `prompts`: `{"query": "Find: "}`' in card and "- `bare_frames_fps`: `24.0`" in card


def test_plain_card_asks_for_no_remote_code(tiny_settings):
    card = card_text(Qwen3_5MoeConfig(**tiny_settings), name="x")
    assert "trust_remote_code" not in card and "`last_hidden_state` of the last token, `<emb>`" in card


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: mit\n---\n# x", "mit"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("# no header", None),
        ("---\n: : [\n---\n", None),
        (None, None),
    ],
)
def test_license_of_a_checkpoint_folder(tmp_path, text, license):
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert license_of(tmp_path) == license


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (12_345_678, "12.3 M"), (34_605_702_000, "34.6 B"), (1500, "1.5 k")]
)
def test_human(count, text):
    assert human(count) == text

"""Designs made of a dense checkpoint: each equals the dense model at the start, and what does not is told apart."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoProcessor, Qwen3_5Model

from modeling_moemb import MoEMBModel
from moemb.trainers import cli, convert_safetensors, upcycling
from moemb.trainers.convert import convert_checkpoint
from moemb.trainers.convert_safetensors import ConversionError, read_checkpoint
from moemb.trainers.upcycling import Design

from .stock_checkpoint import dense_config, save_dense_checkpoint, save_stock_checkpoint, stock_config


WIDTH, G, R = 96, 4, 3
EMB_ID = 263
DESIGNS = {
    "dense": Design("dense"),
    "modality": Design("modality"),
    "upcycled": Design("upcycled", granularity=G, replicas=R),
    "upcycled-two-groups": Design("upcycled", granularity=G, replicas=R, top_k=2 * G, seed=5),
}
LAYER = "language_model.layers.3.mlp"


@pytest.fixture(scope="module")
def dense(tmp_path_factory, tiny_settings):
    """Folder and model of a stock dense checkpoint."""
    folder = tmp_path_factory.mktemp("dense") / "stock"
    return folder, save_dense_checkpoint(folder, dense_config(tiny_settings, WIDTH))


@pytest.fixture(scope="module")
def converted(dense, tmp_path_factory):
    root = tmp_path_factory.mktemp("designs")
    return {
        name: convert_checkpoint(dense[0], root / name, design=design, max_shard_bytes=300_000)
        for name, design in DESIGNS.items()
    }


def items():
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255, (48, 64, 3), np.uint8)
    video = generator.integers(0, 255, (6, 32, 32, 3), np.uint8)
    return ["a", "a longer text, with 数字 9", image, [image, "what is it?"], {"video": video, "text": "and"}]


def weights(folder) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def expected(dense, converted):
    """Vectors of the stock dense model, with the `<emb>` row of a conversion, and the inputs."""
    model = dense[1].model
    table = weights(converted["dense"])["language_model.embed_tokens.weight"]
    with torch.no_grad():
        model.get_input_embeddings().weight[EMB_ID] = table[EMB_ID]
        processor = AutoProcessor.from_pretrained(converted["dense"], trust_remote_code=True)
        inputs = [processor([item]) for item in items()]
        states = [model(**features, use_cache=False).last_hidden_state[:, -1] for features in inputs]
    return inputs, F.normalize(torch.cat(states))


def vectors(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return F.normalize(torch.cat([model(**features).pooler_output for features in inputs]).float())


def load(folder):
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("design", DESIGNS)
def test_the_new_model_equals_the_dense_one(converted, expected, design):
    inputs, reference = expected
    assert (vectors(load(converted[design]), inputs) - reference).abs().max() <= 1e-5


def test_shards_lie_where_the_formula_says(dense, converted):
    stock, new = weights(dense[0]), weights(converted["upcycled"])
    gate, up, down = (stock[f"model.{LAYER}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    size = WIDTH // G
    for replica in range(R):
        for shard in range(G):
            j, part = replica * G + shard, slice(shard * size, (shard + 1) * size)
            assert torch.equal(new[f"{LAYER}.experts.gate_up_proj"][j], torch.cat([gate[part], up[part]]))
            assert torch.equal(new[f"{LAYER}.experts.down_proj"][j], G * down[:, part])
    router = new[f"{LAYER}.gate.weight"].view(R, G, -1)
    assert torch.equal(router, router[:, :1].expand_as(router))  # virtual groups
    assert len(torch.unique(router[:, 0], dim=0)) == R
    assert router.std() == pytest.approx(0.02, rel=0.3)
    assert not any("shared_expert" in key for key in new)


@pytest.mark.parametrize("design", ["upcycled", "upcycled-two-groups"])
def test_tokens_go_to_whole_groups(converted, expected, design):
    model = load(converted[design])
    top_k = model.config.text_config.num_experts_per_tok
    groups = set()
    for features in expected[0]:
        with torch.no_grad():
            for logits in model(**features, output_router_logits=True).router_logits:
                chosen = logits.topk(top_k, dim=-1).indices.sort(dim=-1).values.view(-1, top_k // G, G)
                assert (chosen % G == torch.arange(G)).all() and (chosen // G == chosen[..., :1] // G).all()
                groups |= set((chosen // G).flatten().tolist())
    assert groups == set(range(R))


def test_the_cube_root_recipe_is_not_the_dense_model(converted, expected):
    """The scale spread over gate, up and down: SiLU is not homogeneous."""
    inputs, reference = expected
    model = load(converted["upcycled"])
    root = G ** (1 / 3)
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.mlp.experts.gate_up_proj *= root
            layer.mlp.experts.down_proj *= root / G
    assert (vectors(model, inputs) - reference).abs().max() > 1e-3


def test_without_virtual_groups_it_is_not_the_dense_model(converted, expected):
    inputs, reference = expected
    model = load(converted["upcycled"])
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.mlp.gate.weight.normal_(std=0.02)
    assert (vectors(model, inputs) - reference).abs().max() > 1e-3


@pytest.mark.parametrize("granularity", [1, 6])
def test_other_granularities_are_exact_too(dense, expected, tmp_path, granularity):
    design = Design("upcycled", granularity=granularity, replicas=2)
    target = convert_checkpoint(dense[0], tmp_path / "new", design=design)
    assert (vectors(load(target), expected[0]) - expected[1]).abs().max() <= 1e-5


def test_bf16_scaling_is_exact(tmp_path, tiny_settings):
    save_dense_checkpoint(tmp_path / "stock", dense_config(tiny_settings, WIDTH), dtype=torch.bfloat16, shard="1GB")
    target = convert_checkpoint(tmp_path / "stock", tmp_path / "new", design=DESIGNS["upcycled"])
    stock, new = weights(tmp_path / "stock"), weights(target)
    down = stock[f"model.{LAYER}.down_proj.weight"].view(-1, G, WIDTH // G).transpose(0, 1)
    assert torch.equal(new[f"{LAYER}.experts.down_proj"].view(R, G, -1, WIDTH // G), (4 * down).expand(R, -1, -1, -1))
    router = new[f"{LAYER}.gate.weight"].view(R, G, -1)
    assert router.dtype == torch.bfloat16 and torch.equal(router, router[:, :1].expand_as(router))


def test_blocks_do_not_matter(dense, tmp_path, monkeypatch):
    """Also with random numbers: what is drawn does not depend on how much is read at a time."""
    design = Design("upcycled", granularity=G, replicas=R, noise=0.1, reinit=0.5)
    whole = convert_checkpoint(dense[0], tmp_path / "whole", design=design)
    monkeypatch.setattr(convert_safetensors, "BLOCK_BYTES", 1000)
    upcycling.moments.cache_clear()
    pieces = convert_checkpoint(dense[0], tmp_path / "pieces", design=design)
    one, other = weights(whole), weights(pieces)
    for key, tensor in one.items():  # mean and deviation are sums of blocks: they may differ in the last bit
        torch.testing.assert_close(other[key], tensor, atol=1e-7, rtol=1e-6)


def test_noise_is_relative_and_breaks_the_symmetry_of_copies(dense, converted, tmp_path):
    design = Design("upcycled", granularity=G, replicas=R, noise=0.1, seed=3)
    new = weights(convert_checkpoint(dense[0], tmp_path / "noisy", design=design))
    exact, stock = weights(converted["upcycled"]), weights(dense[0])
    for name, parts, scale in (("gate_up_proj", ("gate", "up"), 1), ("down_proj", ("down",), G)):
        change = new[f"{LAYER}.experts.{name}"] - exact[f"{LAYER}.experts.{name}"]
        for part, values in zip(parts, change.chunk(len(parts), dim=1)):
            deviation = float(stock[f"model.{LAYER}.{part}_proj.weight"].std())
            assert float(values.std()) == pytest.approx(0.1 * scale * deviation, rel=0.05)
        assert len(torch.unique(new[f"{LAYER}.experts.{name}"], dim=0)) == G * R
    again = weights(convert_checkpoint(dense[0], tmp_path / "again", design=design))
    assert all(torch.equal(again[key], tensor) for key, tensor in new.items())


def test_reinitialised_channels_are_whole_and_of_the_old_spread(dense, converted, tmp_path):
    design = Design("upcycled", granularity=G, replicas=R, reinit=0.5)
    new = weights(convert_checkpoint(dense[0], tmp_path / "dropped", design=design))
    exact = weights(converted["upcycled"])
    gate_up, down = (new[f"{LAYER}.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    same_gate, same_up = (gate_up == exact[f"{LAYER}.experts.gate_up_proj"]).chunk(2, dim=1)
    same_down = down == exact[f"{LAYER}.experts.down_proj"]
    kept = same_gate.all(-1)  # (experts, channels)
    assert torch.equal(kept, same_up.all(-1)) and torch.equal(kept, same_down.all(1))
    assert (kept.sum(1) == WIDTH // G // 2).all() and len(torch.unique(kept, dim=0)) > R
    fresh = down.transpose(1, 2)[~kept]
    assert float(fresh.std()) == pytest.approx(float(exact[f"{LAYER}.experts.down_proj"].std()), rel=0.1)


def test_a_dense_moemb_repository_can_be_upcycled(converted, dense, expected, tmp_path):
    """A dense embedder that was trained keeps its `<emb>` row and its conventions."""
    for name in ("upcycled", "modality"):
        target = convert_checkpoint(converted["dense"], tmp_path / name, design=DESIGNS[name], emb_seed=9)
        model = load(target)
        assert (vectors(model, expected[0]) - expected[1]).abs().max() <= 1e-5
        assert model.config.embedding == json.loads((converted["dense"] / "config.json").read_text())["embedding"]
    direct, ours = weights(converted["upcycled"]), weights(tmp_path / "upcycled")
    assert set(direct) == set(ours) and all(torch.equal(direct[key], ours[key]) for key in direct)


def test_plain_dense_repository_loads_in_stock_stacks(dense, expected, tmp_path):
    target = convert_checkpoint(dense[0], tmp_path / "plain", plain=True, design=Design("dense"))
    model = AutoModel.from_pretrained(target).eval()
    assert type(model) is Qwen3_5Model and not list(target.glob("*.py"))
    with torch.no_grad():
        states = [model(**f, use_cache=False).last_hidden_state[:, -1] for f in expected[0]]
    assert (F.normalize(torch.cat(states)) - expected[1]).abs().max() <= 1e-5


@pytest.mark.slow
def test_designs_load_in_a_process_without_the_package(converted, expected, tmp_path):
    save_file({"expected": expected[1]}, tmp_path / "expected.safetensors")
    code = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor
reference = load_file(sys.argv[1])["expected"][:2]
for folder in sys.argv[2:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    features = AutoProcessor.from_pretrained(folder, trust_remote_code=True)(["a", "a longer text, with 数字 9"])
    with torch.no_grad():
        made = torch.nn.functional.normalize(model(**features).pooler_output)
    assert (made - reference).abs().max() <= 1e-5, folder
assert not any(name.split(".")[0] in ("moemb", "modeling_moemb") for name in sys.modules)
print("fine")
"""
    folders = [str(converted[name]) for name in ("dense", "modality", "upcycled")]
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "expected.safetensors"), *folders]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert run.returncode == 0 and run.stdout.endswith("fine\n"), run.stderr


@pytest.mark.parametrize("design", DESIGNS)
def test_every_parameter_that_should_train_moves(converted, expected, design):
    model = MoEMBModel.from_pretrained(converted[design]).train()
    for features in expected[0]:
        model(**features).pooler_output.square().sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().any()}
    assert still == set()
    if design.startswith("upcycled"):
        gradients = model.language_model.layers[0].mlp.experts.gate_up_proj.grad.view(R, G, -1)
        assert (gradients[0] - gradients[1]).abs().max() > 0  # copies see different tokens


def test_cards_say_what_was_made(converted):
    cards = {name: (folder / "README.md").read_text() for name, folder in converted.items()}
    assert f"{G * R} routed, {G} per token, and none shared" in cards["upcycled"]
    assert "1 each for text, image and video tokens" in cards["modality"]
    assert "| experts | none |" in cards["dense"]


def test_command_line(dense, tmp_path, capsys):
    call = ["convert", "--from", str(dense[0]), "--to"]
    flags = ["--design", "upcycled", "--granularity", "4", "--replicas", "2"]
    assert cli.main([*call, str(tmp_path / "new"), *flags]) == 0
    assert "MoEMB model repository (upcycled) written to" in capsys.readouterr().out
    assert json.loads((tmp_path / "new/config.json").read_text())["text_config"]["num_experts"] == 8
    assert cli.main([*call, str(tmp_path / "other"), "--design", "dense", "--replicas", "2"]) == 1
    assert "--replicas needs --design upcycled, but the design is dense" in capsys.readouterr().err


def test_tools_for_learned_routers_refuse_models_without_one(converted, tmp_path):
    from moemb.trainers.calibration import _check_budget
    from moemb.trainers.calibration_passes import CalibrationError
    from moemb.trainers.prune_experts_repository import PruningError, read_pruning_config
    from moemb.trainers.saliency import SaliencyError, expert_blocks

    for name in ("dense", "modality"):
        with pytest.raises(PruningError, match=f"has no learned router \\(feed_forward '{name}'\\)"):
            read_pruning_config(converted[name])
        with pytest.raises(SaliencyError, match="has no learned router"):
            expert_blocks(MoEMBModel.from_pretrained(converted[name]))
        with pytest.raises(CalibrationError, match="has no learned router"):
            _check_budget(converted[name], None)
    assert read_pruning_config(converted["upcycled"])["feed_forward"] == "moe"


@pytest.mark.parametrize(
    ("design", "options", "message"),
    [
        ({}, {}, "has model_type 'qwen3_5': that is the dense Qwen3.5; take --design upcycled, modality or dense"),
        ({"kind": "upcycled", "granularity": 7}, {}, "--granularity is 7, but must divide the width .*, 96"),
        ({"kind": "upcycled"}, {"plain": True}, "--plain does not go with --design upcycled"),
        ({"kind": "modality"}, {"plain": True}, "--plain does not go with --design modality"),
    ],
)
def test_what_does_not_go_together_is_refused(dense, tmp_path, design, options, message):
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(dense[0], tmp_path / "new", design=Design(**design), **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "sparse"}, "--design is 'sparse'"),
        ({"granularity": 0}, "--granularity is 0"),
        ({"replicas": -1}, "--replicas is -1"),
        ({"granularity": 4, "top_k": 6}, "--top-k is 6, but must be a multiple of --granularity 4 up to 16"),
        ({"granularity": 4, "top_k": 20}, "--top-k is 20"),
        ({"reinit": 1.5}, "--reinit is 1.5"),
        ({"noise": float("nan")}, "--noise is nan"),
        ({"kind": "upcycled", "router_std": 0.0}, "--router-std is 0: all experts would tie"),
        ({"seed": -1}, "--design-seed is -1"),
    ],
)
def test_a_design_out_of_range_is_refused(values, message):
    with pytest.raises(ConversionError, match=message):
        Design(**values)


def test_a_checkpoint_with_experts_is_no_dense_one(tmp_path, tiny_settings):
    save_stock_checkpoint(tmp_path / "stock", stock_config(tiny_settings), packed=True)
    with pytest.raises(ConversionError, match="it has experts already, and --design modality starts from a dense"):
        convert_checkpoint(tmp_path / "stock", tmp_path / "new", design=Design("modality"))


def test_a_network_without_a_matrix_is_refused(dense, tmp_path):
    stock = shutil.copytree(dense[0], tmp_path / "stock")
    index = stock / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    key = f"model.{LAYER}.up_proj.weight"
    file = stock / content["weight_map"].pop(key)
    index.write_text(json.dumps(content))
    save_file({k: v for k, v in load_file(file).items() if k != key}, file)
    with pytest.raises(ConversionError, match=f"1 keys are missing: {LAYER}.up_proj.weight"):
        convert_checkpoint(stock, tmp_path / "new", design=DESIGNS["upcycled"])


def test_an_interrupted_conversion_goes_on_and_another_design_starts_anew(dense, converted, tmp_path, monkeypatch):
    from moemb.trainers import convert

    original, written = convert.write_shard, []

    def stops_after_two(path, tensors, on_bytes):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        original(path, tensors, on_bytes)

    monkeypatch.setattr(convert, "write_shard", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(dense[0], tmp_path / "new", design=DESIGNS["upcycled"], max_shard_bytes=300_000)
    rewritten = []
    monkeypatch.setattr(
        convert, "write_shard", lambda path, *rest: (rewritten.append(path.name), original(path, *rest))
    )
    target = convert_checkpoint(dense[0], tmp_path / "new", design=DESIGNS["upcycled"], max_shard_bytes=300_000)
    assert not set(rewritten) & set(written)
    one, other = weights(target), weights(converted["upcycled"])
    assert read_checkpoint(target).keys() == one.keys()
    assert all(torch.equal(one[key], other[key]) for key in other)

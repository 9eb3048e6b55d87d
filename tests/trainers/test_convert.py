import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoProcessor, Qwen3_5MoeModel

from modeling_moemb import MoEMBModel
from moemb.trainers import cli, convert
from moemb.trainers.convert import convert_checkpoint
from moemb.trainers.convert_safetensors import INDEX_NAME, ConversionError, read_checkpoint

from .stock_checkpoint import VOCABULARY, save_stock_checkpoint, stock_config, stock_processor


EMB_ID = 263  # the first row of the padding
LAYOUTS = {"packed": True, "per-expert": False}


@pytest.fixture(scope="module")
def stock(tmp_path_factory, tiny_settings):
    """Folder and model of a stock checkpoint per layout; the weights are the same."""
    root = tmp_path_factory.mktemp("stock")
    config = stock_config(tiny_settings)
    return {name: (root / name, save_stock_checkpoint(root / name, config, packed=p)) for name, p in LAYOUTS.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory, stock):
    """Converted folders by (layout, plain), in several shards."""
    root = tmp_path_factory.mktemp("converted")
    return {
        (name, plain): convert_checkpoint(folder, root / f"{name}-{plain}", plain=plain, max_shard_bytes=300_000)
        for name, (folder, _) in stock.items()
        for plain in (False, True)
    }


@pytest.fixture
def copy_of_stock(tmp_path, stock):
    """A copy of the packed stock checkpoint that a test may damage."""
    return shutil.copytree(stock["packed"][0], tmp_path / "stock")


def items():
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255, (48, 64, 3), np.uint8)
    video = generator.integers(0, 255, (6, 32, 32, 3), np.uint8)
    return ["a", "a longer text, with 数字 9", image, [image, "what is it?"], {"video": video}, [image, "and", image]]


def with_emb_row(model, folder):
    """The stock base model with the `<emb>` row of a converted repository: the reference of every comparison."""
    table = AutoModel.from_pretrained(folder, trust_remote_code=True).get_input_embeddings().weight
    with torch.no_grad():
        model.model.get_input_embeddings().weight[EMB_ID] = table[EMB_ID].detach()
    return model.model


def stock_vector(model, features) -> torch.Tensor:
    """Final-normed state of the last token, which is `<emb>`."""
    assert (features["input_ids"][:, -1] == EMB_ID).all()
    with torch.no_grad():
        return model(**features, use_cache=False).last_hidden_state[:, -1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_equals_the_stock_models_state_at_emb(stock, converted, layout):
    target = converted[layout, False]
    reference = with_emb_row(stock[layout][1], target)
    model = AutoModel.from_pretrained(target, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(target, trust_remote_code=True)
    assert isinstance(model, torch.nn.Module) and model.config.model_type == "moemb"
    for item in items():
        features = processor([item])
        with torch.no_grad():
            vector = model(**features).pooler_output
        difference = (F.normalize(vector) - F.normalize(stock_vector(reference, features))).abs().max()
        assert difference <= 1e-5, f"{type(item)}: {difference}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_repository_loads_in_stock_stacks_and_gives_the_same_vector(stock, converted, layout):
    plain = AutoModel.from_pretrained(converted[layout, True]).eval()
    assert type(plain) is Qwen3_5MoeModel
    ours = AutoModel.from_pretrained(converted[layout, False], trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(converted[layout, False], trust_remote_code=True)
    for item in items():
        features = processor([item])
        with torch.no_grad():
            vector = ours(**features).pooler_output
        difference = (F.normalize(vector) - F.normalize(stock_vector(plain, features))).abs().max()
        assert difference <= 1e-5


def test_plain_repository_encodes_with_stock_sentence_transformers(converted):
    texts = ["a", "a longer text"]
    plain = SentenceTransformer(str(converted["packed", True]), device="cpu")
    assert not list(converted["packed", True].glob("*.py"))
    ours = SentenceTransformer(str(converted["packed", False]), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(plain.encode(texts), ours.encode(texts), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(plain.encode(texts), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_a_moemb_repository_are_the_models_and_packed(converted, layout, stock):
    target = converted[layout, False]
    config = AutoConfig.from_pretrained(target, trust_remote_code=True)
    keys = set(read_checkpoint(target))
    with torch.device("meta"):
        assert keys == set(MoEMBModel(config).state_dict())
    assert not any(".experts.0." in key for key in keys)
    assert config.emb_token_id == EMB_ID and config.text_config.vocab_size == VOCABULARY
    assert len(list(target.glob("*.safetensors"))) > 3
    index = json.loads((target / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.num_bytes for t in read_checkpoint(target).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_a_plain_repository_are_the_stock_ones_but_for_the_head(converted, stock, layout):
    expected = {key for key in read_checkpoint(stock[layout][0]) if not key.startswith("lm_head.")}
    assert set(read_checkpoint(converted[layout, True])) == expected
    config = json.loads((converted[layout, True] / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe" and "auto_map" not in config
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]


def test_loading_reports_nothing_missing_and_nothing_left_over(converted):
    for (_, plain), target in converted.items():
        _, report = AutoModel.from_pretrained(target, trust_remote_code=not plain, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


def test_emb_row_is_seeded_near_the_mean_and_other_rows_are_untouched(stock, converted, tmp_path):
    folder, _ = stock["packed"]
    source = embedding_table(folder, "model.language_model.embed_tokens.weight")
    table = embedding_table(converted["packed", False], "language_model.embed_tokens.weight")
    kept = [row for row in range(VOCABULARY) if row != EMB_ID]
    assert torch.equal(table[kept], source[kept])
    assert (table[EMB_ID] - source[:EMB_ID].mean(0)).abs().max() < 6e-3
    other = convert_checkpoint(folder, tmp_path / "other", emb_seed=7)
    assert not torch.equal(embedding_table(other, "language_model.embed_tokens.weight")[EMB_ID], table[EMB_ID])


def embedding_table(folder, key) -> torch.Tensor:
    with safe_open(read_checkpoint(folder)[key].file, "pt") as file:
        return file.get_tensor(key)


def test_a_table_without_padding_grows(tmp_path, tiny_settings):
    model = save_stock_checkpoint(tmp_path / "stock", stock_config(tiny_settings, EMB_ID), packed=True)
    target = convert_checkpoint(tmp_path / "stock", tmp_path / "new")
    ours = AutoModel.from_pretrained(target, trust_remote_code=True)
    assert ours.config.text_config.vocab_size == EMB_ID + 1 == ours.get_input_embeddings().weight.shape[0]
    assert torch.equal(ours.get_input_embeddings().weight[:EMB_ID], model.model.get_input_embeddings().weight)
    plain = convert_checkpoint(tmp_path / "stock", tmp_path / "plain", plain=True)
    assert AutoModel.from_pretrained(plain).get_input_embeddings().weight.shape[0] == EMB_ID + 1


def test_a_trained_emb_row_is_kept(converted, tmp_path):
    """A plain repository that was fine-tuned elsewhere becomes a MoEMB one without losing its `<emb>`."""
    target = convert_checkpoint(converted["packed", True], tmp_path / "again", emb_seed=99)
    key = "language_model.embed_tokens.weight"
    assert torch.equal(embedding_table(target, key), embedding_table(converted["packed", False], key))


def test_bf16_weights_are_copied_bit_for_bit(tmp_path, tiny_settings):
    save_stock_checkpoint(
        tmp_path / "stock", stock_config(tiny_settings), packed=True, dtype=torch.bfloat16, shard="1GB"
    )
    target = convert_checkpoint(tmp_path / "stock", tmp_path / "new")
    source, new = (load_file(folder / "model.safetensors") for folder in (tmp_path / "stock", target))
    for key, tensor in new.items():
        assert tensor.dtype == torch.bfloat16
        if "embed_tokens" not in key:
            assert torch.equal(tensor, source[f"model.{key}"])
    assert AutoModel.from_pretrained(target, trust_remote_code=True, dtype="auto").dtype == torch.bfloat16


def test_multi_token_prediction_weights_are_dropped(copy_of_stock, tmp_path):
    save_file({"mtp.fc.weight": torch.zeros(3)}, copy_of_stock / "mtp.safetensors")
    index = json.loads((copy_of_stock / INDEX_NAME).read_text())
    index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    (copy_of_stock / INDEX_NAME).write_text(json.dumps(index))
    target = convert_checkpoint(copy_of_stock, tmp_path / "new")
    assert not any("mtp" in key or "lm_head" in key for key in read_checkpoint(target))


def test_command_line(stock, tmp_path, capsys):
    assert cli.main(["convert", "--from", str(stock["packed"][0]), "--to", str(tmp_path / "new")]) == 0
    assert str(tmp_path / "new") in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert cli.main(["convert", "--from", str(stock["packed"][0]), "--to", str(tmp_path / "new")]) == 1
    assert "exists already; remove it or choose another --to" in capsys.readouterr().err


def test_an_empty_folder_may_be_the_target(stock, tmp_path):
    (tmp_path / "new").mkdir()
    assert (convert_checkpoint(stock["packed"][0], tmp_path / "new") / "config.json").is_file()


def test_card_states_the_facts(converted):
    card = (converted["packed", False] / "README.md").read_text()
    assert "trust_remote_code=True" in card and "freshly initialised" in card
    assert "No evaluation of this repository has been run" in card
    assert "trust_remote_code" not in (converted["packed", True] / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "has model_type 'llama': the converter wants 'qwen3_5_moe'"),
        ({"model_type": "qwen3_5"}, "that is the dense Qwen3.5"),
        ({"model_type": "moemb"}, "it is a MoEMB repository already"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantised \(fp8\); convert the bf16 checkpoint"),
        ({"quantization_config": "fp8"}, r"is quantised \(fp8\); convert the bf16 checkpoint"),
        ({"model_type": ["qwen3_5"]}, "has model_type .*: the converter wants 'qwen3_5_moe'"),
        ({"text_config": None}, r"config\.json has text_config None; the converter wants a mapping there"),
        ({"text_config": "x"}, r"config\.json has text_config 'x'"),
        ({"vision_config": []}, r"config\.json has vision_config \[\]"),
        ({"text_config": {"num_hidden_layers": "4"}}, r"config\.json has num_hidden_layers '4'"),
        ({"text_config": {"layer_types": "full_attention"}}, r"config\.json has layer_types 'full_attention'"),
        (
            {"text_config": {"num_hidden_layers": 4, "layer_types": ["full_attention"]}},
            r"config\.json contradicts itself: num_hidden_layers is 4, but layer_types lists 1 layers",
        ),
        ({"text_config": {"hidden_size": "wide"}}, r"config\.json describes no model that can be built"),
        ({"text_config": {"layer_types": ["quadratic"]}}, r"config\.json describes no model that can be built"),
    ],
)
def test_another_kind_of_checkpoint_is_refused(copy_of_stock, tmp_path, change, message):
    config = json.loads((copy_of_stock / "config.json").read_text())
    (copy_of_stock / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(copy_of_stock, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


def remove_key(folder, key):
    """Take one tensor out of its shard and of the index."""
    index = json.loads((folder / INDEX_NAME).read_text())
    shard = folder / index["weight_map"].pop(key)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    save_file({k: v for k, v in load_file(shard).items() if k != key}, shard)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), r"config\.json holds a list, not a JSON object"),
        (
            lambda folder: (folder / "config.json").write_bytes(b'{"\xff": 1}'),
            r"config\.json is not JSON: 'utf-8' codec",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3_5_moe"}'),
            r"config\.json has no text_config",
        ),
        (lambda folder: (folder / "processor_config.json").write_text("[]"), r"processor_config\.json holds a list"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("null"), r"tokenizer_config\.json holds a None"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json is not JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), r"tokenizer\.json is not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), r"tokenizer\.json is not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), r"tokenizer\.json is not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: next(folder.glob("model-00002*")).unlink(), "1 of .* shards are missing in .*model-00002"),
        (
            lambda folder: remove_key(folder, "model.language_model.norm.weight"),
            "asks for: language_model.norm.weight",
        ),
        (
            lambda folder: remove_key(folder, "model.language_model.embed_tokens.weight"),
            "lacks the embedding table 'model.language_model.embed_tokens.weight'",
        ),
    ],
)
def test_an_incomplete_checkpoint_is_refused(copy_of_stock, tmp_path, damage, message):
    damage(copy_of_stock)
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(copy_of_stock, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


def link_to(path):
    """A `new` in the folder that is a symbolic link to `path`."""
    return lambda folder: (folder / "new").symlink_to(path)


@pytest.mark.parametrize(
    ("prepare", "name", "options", "message"),
    [
        (link_to("absent"), "new", {}, "target .*new is a symbolic link; remove it or choose another --to"),
        (link_to("."), "new", {}, "target .*new is a symbolic link"),
        (lambda folder: (folder / "file").touch(), "file/new", {}, "target .*file/new lies under a file"),
        (lambda folder: (folder / "file").touch(), "file/a/new", {}, "target .*file/a/new lies under a file"),
        (None, "new", {"emb_seed": -1}, "--emb-seed is -1, but must be 0 or more"),
        (None, "new", {"max_shard_bytes": 0}, "--max-shard-gb is 0, but must be finite and above 0"),
        (None, "new", {"max_shard_bytes": -(2**30)}, "--max-shard-gb is -1, but"),
        (None, "new", {"max_shard_bytes": float("nan")}, "--max-shard-gb is nan, but"),
        (None, "new", {"max_shard_bytes": float("inf")}, "--max-shard-gb is inf, but"),
    ],
)
def test_an_unusable_target_or_option_is_refused(stock, tmp_path, prepare, name, options, message):
    if prepare:
        prepare(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(stock["packed"][0], tmp_path / name, **options)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "{}/new", "--max-shard-gb", "nan"], "--max-shard-gb is nan, but"),
        (["--to", "{}/new", "--max-shard-gb=inf"], "--max-shard-gb is inf, but"),
        (["--to", "{}/new", "--max-shard-gb", "-0.5"], "--max-shard-gb is -0.5, but"),
        (["--to", "{}/new", "--emb-seed", "-1"], "--emb-seed is -1, but"),
        (["--to", "{}/" + "x" * 300], "x: File name too long"),
    ],
)
def test_command_line_refuses_in_one_line(stock, tmp_path, capsys, flags, message):
    flags = [flag.format(tmp_path) for flag in flags]
    assert cli.main(["convert", "--from", str(stock["packed"][0]), *flags]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("moemb convert: error: ") and message in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_refused_before_anything_is_written(stock, tmp_path, monkeypatch):
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(ConversionError, match=r"GB are needed at .*, 0\.0 GB are free; make room"):
        convert_checkpoint(stock["packed"][0], tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list(tmp_path.rglob("*.safetensors*"))


def test_neither_folder_nor_hub_id(tmp_path):
    with pytest.raises(ConversionError, match="neither a folder nor a Hub id"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "new")
    with pytest.raises(ConversionError, match="owner/absent is no folder here and the Hub did not give it"):
        convert_checkpoint("owner/absent", tmp_path / "new")


def test_a_hub_id_is_downloaded(stock, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, revision=None, allow_patterns=None):
        asked.append((name, revision))
        return str(stock["packed"][0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    target = convert_checkpoint("Qwen/Qwen3.5-35B-A3B", tmp_path / "new", revision="main")
    assert asked == [("Qwen/Qwen3.5-35B-A3B", "main")]
    assert "base_model: Qwen/Qwen3.5-35B-A3B" in (target / "README.md").read_text()


def test_processor_of_the_tests_is_the_stock_class():
    assert type(stock_processor()).__name__ == "Qwen3VLProcessor"

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor, Qwen3_5MoeConfig, Qwen3VLProcessor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers import repository
from moemb.trainers.repository import (
    RepositoryError,
    assemble_checkpoint,
    assemble_repository,
    processor_from_checkpoint,
    write_repository_files,
)

from ..processors import lean_processor
from .stock_checkpoint import stock_processor


def token_settings(processor) -> dict:
    return {
        "image_token_id": processor.image_token_id,
        "video_token_id": processor.video_token_id,
        "vision_start_token_id": processor.vision_start_token_id,
        "vision_end_token_id": processor.vision_end_token_id,
    }


@pytest.fixture(scope="module")
def processor():
    return lean_processor()


@pytest.fixture
def config(tiny_settings, processor) -> MoEMBConfig:
    emb = processor.tokenizer.convert_tokens_to_ids("<emb>")
    return MoEMBConfig(**(tiny_settings | token_settings(processor)), emb_token_id=emb)


@pytest.fixture
def model(config) -> MoEMBModel:
    return MoEMBModel(config).eval()


def picture(side: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8))


class TestAssemble:
    def test_files(self, tmp_path, model, processor):
        target = assemble_repository(tmp_path / "a" / "mini", model=model, processor=processor, card_text="# Card\n")
        names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
        assert names >= {
            "README.md",
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "processor_config.json",
            "chat_template.jinja",
            "modules.json",
            "sentence_bert_config.json",
            "config_sentence_transformers.json",
            "1_Pooling/config.json",
            "modeling_moemb.py",
            "processing_moemb.py",
            "sentence_transformer_moemb.py",
        }
        assert "__init__.py" not in names and not any("pycache" in name for name in names)
        read = {name: json.loads((target / name).read_text()) for name in names if name.endswith(".json")}
        assert read["config.json"]["auto_map"] == {
            "AutoConfig": "configuration_moemb.MoEMBConfig",
            "AutoModel": "modeling_moemb.MoEMBModel",
        }
        assert read["config.json"]["embedding"] == processor.conventions()
        assert read["processor_config.json"]["auto_map"] == {"AutoProcessor": "processing_moemb.MoEMBProcessor"}
        assert read["modules.json"][0] == {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformer_moemb.MoEMBTransformer",
            "kwargs": ["adaptive_compute", "router_task"],
        }
        assert set(read["sentence_bert_config.json"]["modality_config"]) == {"text", "image", "video", "message"}
        demanded = SpecifierSet(read["config_sentence_transformers.json"]["requirements"]["transformers"])
        assert list(demanded.filter(["5.21.0", "5.22.2", "5.24.0", "6.0.0"])) == ["5.22.2", "5.24.0"]
        assert read["1_Pooling/config.json"]["pooling_mode"] == "lasttoken"
        assert [path.name for path in target.parent.iterdir()] == ["mini"], "no draft is left behind"

    def test_no_machine_path_inside(self, tmp_path, model, processor):
        target = assemble_repository(tmp_path / "mini", model=model, processor=processor)
        for path in target.rglob("*.json"):
            assert str(tmp_path) not in path.read_text(), path.name

    def test_from_weights(self, tmp_path, model, processor):
        model.save_pretrained(tmp_path / "checkpoint", max_shard_size="100KB")
        processor.save_pretrained(tmp_path / "checkpoint")
        assert (tmp_path / "checkpoint" / "model.safetensors.index.json").is_file()
        (tmp_path / "checkpoint" / "README.md").write_text("# Mine\n")
        (tmp_path / "checkpoint" / "optimizer.pt").write_bytes(b"large")
        target = assemble_checkpoint(tmp_path / "checkpoint", tmp_path / "mini")
        assert (target / "README.md").read_text() == "# Mine\n" and not (target / "optimizer.pt").exists()
        loaded = AutoModel.from_pretrained(target, trust_remote_code=True)
        features = AutoProcessor.from_pretrained(target, trust_remote_code=True)(["a", {"image": picture()}])
        with torch.no_grad():
            torch.testing.assert_close(loaded(**features).pooler_output, model(**features).pooler_output)
        again = assemble_checkpoint(tmp_path / "checkpoint", tmp_path / "mini")
        assert again == target and (target / "modules.json").is_file()

    def test_conventions_are_written_everywhere(self, tmp_path, model, processor):
        prompts = {"query": "find", "document": ""}
        target = assemble_repository(
            tmp_path / "mini", model=model, processor=processor, conventions={"prompts": prompts}
        )
        for name in ("config.json", "processor_config.json"):
            assert json.loads((target / name).read_text())["embedding"]["prompts"] == prompts
        assert json.loads((target / "config_sentence_transformers.json").read_text())["prompts"] == prompts
        assert processor.embedding["prompts"] == {"query": "", "document": ""}, "the caller's processor is untouched"
        with pytest.raises(ValueError, match="unknown conventions"):
            assemble_repository(tmp_path / "x", model=model, processor=processor, conventions={"promt": {}})
        assert not (tmp_path / "x").exists()

    def test_refusals(self, tmp_path, model, processor, config):
        with pytest.raises(RepositoryError, match="either"):
            assemble_repository(tmp_path / "a", processor=processor)
        (tmp_path / "there").mkdir()
        with pytest.raises(RepositoryError, match="exists"):
            assemble_repository(tmp_path / "there", model=model, processor=processor)
        with pytest.raises(RepositoryError, match="no \\*.safetensors"):
            assemble_repository(tmp_path / "b", weights_dir=tmp_path / "there", processor=processor)
        with pytest.raises(RepositoryError, match="lacks .*tokenizer.json"):
            assemble_checkpoint(tmp_path / "there", tmp_path / "c")
        config.emb_token_id = 3
        with pytest.raises(RepositoryError, match="emb_token_id is 3"):
            assemble_repository(tmp_path / "d", model=model, config=config, processor=processor)
        with pytest.raises(RepositoryError, match="plain=True"):
            write_repository_files(tmp_path, config=config, processor=processor, plain=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


class TestAtomic:
    def test_failure_leaves_the_old_repository(self, tmp_path, model, processor, monkeypatch):
        target = assemble_repository(tmp_path / "mini", model=model, processor=processor, card_text="old")

        def fail(*args, **kwargs):
            raise OSError("no space left")

        monkeypatch.setattr(repository, "write_repository_files", fail)
        with pytest.raises(OSError, match="no space"):
            assemble_repository(target, model=model, processor=processor, card_text="new", overwrite=True)
        assert (target / "README.md").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["mini"]

    @pytest.mark.slow
    def test_killed_in_the_middle(self, tmp_path, model, processor):
        model.save_pretrained(tmp_path / "checkpoint")
        processor.save_pretrained(tmp_path / "checkpoint")
        script = f"""
            import os, signal
            from pathlib import Path
            from moemb.trainers import repository
            write = repository.write_repository_files
            def write_then_die(*args, **kwargs):
                write(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            repository.write_repository_files = write_then_die
            repository.assemble_checkpoint(Path({str(tmp_path / "checkpoint")!r}), Path({str(tmp_path / "mini")!r}))
        """
        killed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "mini").exists()
        assert (assemble_checkpoint(tmp_path / "checkpoint", tmp_path / "mini") / "modules.json").is_file()


class TestStockProcessor:
    def test_emb_is_added_once(self, tmp_path):
        stock_processor().save_pretrained(tmp_path)
        ours = processor_from_checkpoint(tmp_path)
        emb = ours.tokenizer.convert_tokens_to_ids("<emb>")
        assert emb == len(stock_processor().tokenizer)
        assert ours.tokenizer.convert_tokens_to_ids(
            "<|im_start|>"
        ) == stock_processor().tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert ours(["a"])["input_ids"][0, -1] == emb
        assert ours.conventions()["video"]["max_frames"] == 64 and ours.tokenizer.model_max_length == 8192
        plain = processor_from_checkpoint(tmp_path, plain=True)
        plain.save_pretrained(tmp_path / "plain")
        assert processor_from_checkpoint(tmp_path / "plain").tokenizer.convert_tokens_to_ids("<emb>") == emb
        assert type(plain) is Qwen3VLProcessor
        text = plain.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert text.endswith("<|im_start|>assistant\n<emb>")

    def test_missing_files(self, tmp_path):
        with pytest.raises(RepositoryError, match="no complete processor"):
            processor_from_checkpoint(tmp_path)
        stock_processor().tokenizer.save_pretrained(tmp_path)
        with pytest.raises(RepositoryError, match=r"preprocessor_config|wants a Qwen3VLProcessor"):
            processor_from_checkpoint(tmp_path)


class TestPlain:
    """The variant for stacks that run none of our code."""

    @pytest.fixture
    def both(self, tmp_path, tiny_settings):
        stock_processor().save_pretrained(tmp_path / "stock")
        ours, plain = (processor_from_checkpoint(tmp_path / "stock", plain=flag) for flag in (False, True))
        settings = tiny_settings | token_settings(ours)
        backbone = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**settings)).eval()
        (tmp_path / "plain").mkdir()
        backbone.save_pretrained(tmp_path / "plain")
        write_repository_files(tmp_path / "plain", config=backbone.config, processor=plain, plain=True)
        config = MoEMBConfig(**settings, emb_token_id=ours.tokenizer.convert_tokens_to_ids("<emb>"))
        model = MoEMBModel(config).eval()
        model.load_state_dict(backbone.model.state_dict())
        assemble_repository(tmp_path / "ours", model=model, processor=ours)
        return tmp_path / "plain", tmp_path / "ours"

    def test_no_code_of_ours(self, both):
        plain, _ = both
        assert not list(plain.glob("*.py"))
        modules = json.loads((plain / "modules.json").read_text())
        assert all(module["type"].startswith("sentence_transformers.") for module in modules)
        assert not any("kwargs" in module for module in modules)
        for name in ("config.json", "processor_config.json"):
            assert "auto_map" not in json.loads((plain / name).read_text())
        assert json.loads((plain / "config.json").read_text())["model_type"] == "qwen3_5_moe"

    def test_same_vectors_as_ours(self, both):
        plain, ours = (
            SentenceTransformer(str(path), trust_remote_code=flag) for path, flag in zip(both, (False, True))
        )
        items = ["hello", {"image": picture()}, {"image": picture(48), "text": "red"}, "a longer text " * 5]
        for name in ("encode", "encode_query", "encode_document"):
            one, other = getattr(plain, name)(items), getattr(ours, name)(items)
            np.testing.assert_allclose(one, other, atol=1e-5)

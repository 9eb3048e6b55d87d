import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import sentence_transformers
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoModel, AutoProcessor

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.sentence_transformer_moemb import MoEMBTransformer
from moemb.trainers.repository import assemble_repository

from ..processors import lean_processor, qwen_processor


def picture(height=64, width=64, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def some_items() -> list:
    clip = np.stack([picture(seed=index) for index in range(4)])
    return [
        "hello",
        "",
        {"text": "red", "image": picture()},
        {"video": clip, "text": "walk"},
        [picture(32, 32), "and", picture(40, 90)],
        Image.fromarray(picture(seed=3)),
        clip,
        "a longer text " * 9,
        [{"role": "system", "content": "own"}, {"role": "user", "content": "chat"}],
    ]


def build(tiny_settings, processor) -> MoEMBModel:
    text = tiny_settings["text_config"] | {"vocab_size": len(processor.tokenizer)}
    tokens = {
        "image_token_id": processor.image_token_id,
        "video_token_id": processor.video_token_id,
        "vision_start_token_id": processor.vision_start_token_id,
        "vision_end_token_id": processor.vision_end_token_id,
        "emb_token_id": processor.tokenizer.convert_tokens_to_ids("<emb>"),
    }
    torch.manual_seed(1)
    model = MoEMBModel(MoEMBConfig(**(tiny_settings | {"text_config": text} | tokens))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    processor = lean_processor(max_length=128)
    prompts = {"query": "find: ", "document": ""}
    return assemble_repository(
        tmp_path_factory.mktemp("repository") / "mini",
        model=build(tiny_settings, processor),
        processor=processor,
        conventions={"prompts": prompts},
        card_text="---\nlicense: apache-2.0\n---\n# Tiny\n",
    )


@pytest.fixture(scope="module")
def model(repository):
    return SentenceTransformer(str(repository), trust_remote_code=True, device="cpu")


@pytest.fixture(scope="module")
def vectors(model):
    return model.encode(some_items())


class TestSameVector:
    def test_auto_classes(self, repository, model, vectors):
        processor = AutoProcessor.from_pretrained(repository, trust_remote_code=True)
        backbone = AutoModel.from_pretrained(repository, trust_remote_code=True)
        with torch.no_grad():
            pooled = backbone(**processor(some_items())).pooler_output
        np.testing.assert_allclose(torch.nn.functional.normalize(pooled, dim=-1).numpy(), vectors, atol=1e-5)
        with torch.no_grad():
            query = backbone(**processor(some_items(), prompt_name="query")).pooler_output
        query = torch.nn.functional.normalize(query, dim=-1).numpy()
        np.testing.assert_allclose(query, model.encode_query(some_items()), atol=1e-5)
        assert np.abs(query - vectors).max() > 1e-3
        assert np.abs(query - vectors)[-1].max() < 1e-5, "a chat with its own system turn keeps it"

    def test_recorded_conventions(self, repository, model):
        recorded = json.loads((repository / "config.json").read_text())["embedding"]
        assert recorded == model.processor.conventions() == model.config.embedding
        assert recorded["prompts"] == model.prompts

    def test_batches_and_order_do_not_matter(self, model, vectors):
        np.testing.assert_allclose(model.encode(some_items(), batch_size=1), vectors, atol=1e-5)
        backwards = model.encode(some_items()[::-1], batch_size=3)[::-1]
        np.testing.assert_allclose(backwards, vectors, atol=1e-5)

    def test_left_padding(self, repository, vectors):
        left = SentenceTransformer(str(repository), trust_remote_code=True, processor_kwargs={"padding_side": "left"})
        assert left.tokenizer.padding_side == "left"
        np.testing.assert_allclose(left.encode(some_items()), vectors, atol=1e-5)

    def test_token_embeddings(self, model, vectors):
        for output, vector in zip(model.encode(some_items(), output_value=None), vectors, strict=True):
            np.testing.assert_allclose(output["sentence_embedding"], vector, atol=1e-5)
        tokens = model.encode(some_items(), output_value="token_embeddings")
        pooled = torch.nn.functional.normalize(torch.stack([rows[-1] for rows in tokens]), dim=-1)
        np.testing.assert_allclose(pooled, vectors, atol=1e-5)


class TestEncode:
    def test_single_and_batch(self, model, vectors):
        for item, vector in zip(some_items(), vectors, strict=True):
            if isinstance(item, list) and not isinstance(item[0], dict):
                item = [item]
                assert model.encode(item).shape == (1, 64)
                np.testing.assert_allclose(model.encode(item)[0], vector, atol=1e-5)
            else:
                np.testing.assert_allclose(model.encode(item), vector, atol=1e-5)

    def test_other_containers(self, model):
        expected = model.encode(["one", "two"])
        pandas = pytest.importorskip("pandas")
        for batch in (("one", "two"), np.array(["one", "two"]), pandas.Series(["one", "two"]), iter(["one", "two"])):
            np.testing.assert_allclose(model.encode(batch), expected, atol=1e-5)

    def test_files_and_bytes(self, model, tmp_path):
        image = Image.fromarray(picture())
        path = tmp_path / "a.png"
        image.save(path)
        expected = model.encode(image)
        for item in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), {"bytes": path.read_bytes()}):
            np.testing.assert_allclose(model.encode(item), expected, atol=1e-6)
            np.testing.assert_allclose(model.encode([item])[0], expected, atol=1e-6)

    def test_nothing(self, model):
        assert model.encode([]).shape == (0, 64)
        assert model.encode([]).dtype == np.float32
        assert model.encode([], truncate_dim=16).shape == (0, 16)
        assert model.encode([], precision="int8").dtype == np.int8
        binary = model.encode([], precision="ubinary")
        assert binary.shape == (0, 8) and binary.dtype == np.uint8
        tensor = model.encode([], convert_to_tensor=True)
        assert tensor.shape == (0, 64) and tensor.dtype == torch.float32
        assert model.encode([], convert_to_numpy=False) == []
        assert model.encode_query([]).shape == (0, 64)
        assert model.similarity(model.encode([]), model.encode(["a"])).shape == (0, 1)
        with pytest.raises(ValueError, match="not found"):
            model.encode([], prompt_name="nope")

    def test_unit_norm_after_truncation(self, repository, model, vectors):
        assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
        cut = model.encode(some_items(), truncate_dim=16)
        assert cut.shape == (9, 16)
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(
            cut, vectors[:, :16] / np.linalg.norm(vectors[:, :16], axis=1, keepdims=True), atol=1e-5
        )
        loaded = SentenceTransformer(str(repository), trust_remote_code=True, truncate_dim=16)
        np.testing.assert_allclose(loaded.encode(some_items()), cut, atol=1e-6)
        assert loaded.encode([]).shape == (0, 16)
        with model.truncate_embeddings(8):
            np.testing.assert_allclose(np.linalg.norm(model.encode(["a"]), axis=1), 1, atol=1e-6)
        dicts = model.encode(some_items(), truncate_dim=16, output_value=None)
        np.testing.assert_allclose(dicts[0]["sentence_embedding"], cut[0], atol=1e-5)

    @pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
    def test_precision(self, model, precision):
        columns = 8 if precision.endswith("binary") else 64
        quantised = model.encode(some_items(), precision=precision)
        assert quantised.shape == (9, columns)
        assert quantised.dtype == {"binary": np.int8, "ubinary": np.uint8}.get(precision, precision)

    def test_tensors(self, model, vectors):
        tensor = model.encode(some_items(), convert_to_tensor=True, device="cpu")
        assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor, vectors, atol=1e-6)
        assert isinstance(model.encode(["a"], convert_to_numpy=False), list)
        assert isinstance(model.encode("a", convert_to_tensor=True), torch.Tensor)

    def test_queries_and_documents(self, model):
        items = ["a", {"image": picture()}]
        np.testing.assert_allclose(model.encode_query(items), model.encode(items, prompt="find: "), atol=1e-6)
        np.testing.assert_allclose(model.encode_document(items), model.encode(items), atol=1e-6)
        scores = model.similarity(model.encode_query(items), model.encode_document(items))
        assert scores.shape == (2, 2) and scores.dtype == torch.float32
        assert model.similarity_fn_name == "cosine"
        assert model.similarity_pairwise(model.encode(items), model.encode(items)).tolist() == pytest.approx([1, 1])

    def test_progress_bar(self, model, capsys):
        model.encode(["a", "b", "c"], batch_size=1, show_progress_bar=True)
        assert "3/3" in capsys.readouterr().err
        model.encode(["a"], show_progress_bar=False)
        assert capsys.readouterr().err == ""

    def test_adaptive_compute(self, model, vectors):
        cheaper = model.encode(some_items(), adaptive_compute={"top_k": 1})
        assert np.abs(cheaper - vectors).max() > 1e-4
        with pytest.raises(ValueError, match="top_k"):
            model.encode(["a"], adaptive_compute={"top_k": 99})
        with pytest.raises(ValueError, match="additional keyword arguments"):
            model.encode(["a"], adaptive=1)

    def test_processing_kwargs(self, model):
        image = picture(200, 200)
        tokens = model.encode(
            image, output_value="token_embeddings", processing_kwargs={"image": {"max_pixels": 16384}}
        )
        assert len(tokens) == 64 + 3
        assert (
            len(model.encode("x" * 50, output_value="token_embeddings", processing_kwargs={"text": {"max_length": 9}}))
            == 9
        )
        with pytest.raises(ValueError, match="unknown keys"):
            model.encode("x", processing_kwargs={"image": {"size": 3}})

    def test_max_seq_length(self, repository):
        model = SentenceTransformer(str(repository), trust_remote_code=True)
        assert model.max_seq_length == 128
        model.max_seq_length = 24
        long = {"image": picture(), "text": "y" * 99}
        assert len(model.encode(long, output_value="token_embeddings")) == 24
        np.testing.assert_allclose(model.encode("z" * 999), model.encode("z" * 999, batch_size=1), atol=1e-6)
        model.max_seq_length = 10
        with pytest.raises(ValueError, match="item 1: .*limit of 10"):
            model.encode(["a", long])

    def test_half_precision(self, repository, vectors):
        half = SentenceTransformer(str(repository), trust_remote_code=True, model_kwargs={"dtype": torch.bfloat16})
        assert half.dtype == torch.bfloat16
        low = half.encode(some_items())
        assert (low * vectors).sum(1).min() > 0.99
        np.testing.assert_allclose(np.linalg.norm(low, axis=1), 1, atol=1e-6)

    def test_does_not_log_a_batch_away(self, model, caplog):
        with caplog.at_level(logging.WARNING):
            model.encode(["a\ud800"])
        assert "surrogates" in caplog.text


class TestErrors:
    @pytest.mark.parametrize(
        "bad",
        [
            None,
            5,
            np.full((64, 64, 3), np.nan),
            {"image": "missing.png"},
            {"image": "https://example.org/a.png"},
            {"text": "a", "image": None},
            b"rubbish",
            object(),
            {"txt": "a"},
            [],
        ],
        ids=str,
    )
    def test_index_is_the_users(self, model, bad):
        items = ["long text " * index for index in range(40)]
        items[29] = bad
        with pytest.raises(ValueError, match="^item 29: "):
            model.encode(items, batch_size=4)
        with pytest.raises(ValueError, match="^item 29: "):
            model.encode_query(items, batch_size=64)

    def test_single_bad_item(self, model):
        for bad in (None, 5, b"rubbish"):
            with pytest.raises(ValueError, match="^item 0: "):
                model.encode(bad)


class TestLifecycle:
    def test_resave(self, model, vectors, tmp_path):
        model.save_pretrained(str(tmp_path / "again"))
        loaded = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True)
        np.testing.assert_array_equal(loaded.encode(some_items()), vectors)
        first, second = (
            json.loads((tmp_path / "again" / name).read_text())
            for name in ("modules.json", "config_sentence_transformers.json")
        )
        assert first[0]["type"] == "sentence_transformer_moemb.MoEMBTransformer"
        assert first[0]["kwargs"] == ["adaptive_compute"]
        assert second["model_type"] == "SentenceTransformer" and "transformers" in second["requirements"]

    def test_built_from_the_package(self, tiny_settings, tmp_path):
        """As a trainer builds it: modules from the package, saved, loaded by those who lack the package."""
        processor = qwen_processor()
        backbone = build(tiny_settings, processor)
        backbone.config.embedding = processor.conventions()
        backbone.save_pretrained(tmp_path / "plain")
        processor.save_pretrained(tmp_path / "plain")
        first = MoEMBTransformer(str(tmp_path / "plain"))
        model = SentenceTransformer(modules=[first, Pooling(64, "lasttoken"), Normalize()], device="cpu")
        assert isinstance(model, sentence_transformers.SentenceTransformer)
        vectors = model.encode(some_items())
        model.save_pretrained(str(tmp_path / "saved"))
        loaded = SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True)
        np.testing.assert_array_equal(loaded.encode(some_items()), vectors)

    def test_training_step(self, repository):
        model = SentenceTransformer(str(repository), trust_remote_code=True)
        features = model.preprocess(some_items(), prompt="find: ")
        assert features["num_images_per_sample"].tolist() == [0, 0, 1, 0, 2, 1, 0, 0, 0]
        assert features["num_videos_per_sample"].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0]
        model.train()
        output = model(features)
        output["sentence_embedding"].sum().backward()
        assert output["token_embeddings"].shape[:2] == features["input_ids"].shape
        assert sum(p.grad is not None for p in model.parameters()) > 50
        assert model.preprocess([]) == {}

    def test_gradient_cache(self, repository):
        """The cached loss cuts a multimodal batch into pieces: it needs the number of images of each item."""
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
            MultipleNegativesRankingLoss,
        )

        model = SentenceTransformer(str(repository), trust_remote_code=True)
        texts = ["red", "green", "blue", "white", "black"]
        images = [{"image": picture(32 + 16 * index, 48, seed=index)} for index in range(5)]
        columns = [model.preprocess(texts), model.preprocess(images)]
        losses = []
        for loss in (
            MultipleNegativesRankingLoss(model),
            CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        ):
            model.zero_grad()
            value = loss([dict(column) for column in columns], None)
            value.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            losses.append((value.item(), norm.item()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    def test_threads(self, model, vectors):
        """A server calls one model from many threads, some of them for token embeddings."""
        from concurrent.futures import ThreadPoolExecutor

        def work(number):
            if number % 2:
                return [len(rows) for rows in model.encode(["a", "bb"], output_value="token_embeddings")]
            return model.encode(some_items())

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(8)))
        assert all(result == [2, 3] for result in results[1::2])
        for result in results[::2]:
            np.testing.assert_allclose(result, vectors, atol=1e-5)

    @pytest.mark.slow
    def test_multi_process_pool(self, repository, vectors):
        """Workers get the model by pickle; `kernels` is installed, which breaks the stock Gated DeltaNet here."""
        script = f"""
            import sys; sys.path.insert(0, {os.getcwd()!r})
            import numpy as np
            from sentence_transformers import SentenceTransformer
            from tests.modeling_moemb.test_sentence_transformer import some_items
            if __name__ == "__main__":
                model = SentenceTransformer({str(repository)!r}, trust_remote_code=True, device="cpu")
                pool = model.start_multi_process_pool(["cpu", "cpu"])
                pooled = model.encode(some_items(), pool=pool, chunk_size=2)
                try:
                    model.encode(["a"] * 5 + [None], pool=pool, chunk_size=2)
                except ValueError as error:
                    assert str(error).startswith("item 5: "), error
                else:
                    raise AssertionError("no error")
                model.stop_multi_process_pool(pool)
                np.save(sys.argv[1], pooled)
        """
        target = repository.parent / "pool.npy"
        code = repository.parent / "pool.py"
        code.write_text(textwrap.dedent(script))
        subprocess.run([sys.executable, str(code), str(target)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        np.testing.assert_allclose(np.load(target), vectors, atol=1e-5)

    def test_pickle(self, model, vectors):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).encode(some_items()), vectors)

    @pytest.mark.slow
    def test_fresh_process_without_our_package(self, repository, vectors, tmp_path):
        moved = tmp_path / "moved here"
        shutil.copytree(repository, moved)
        script = f"""
            import sys
            for name in ("moemb", "modeling_moemb", "trl", "peft", "kernels", "mteb", "av"):
                sys.modules[name] = None  # as if it were not installed
            import numpy as np
            from sentence_transformers import SentenceTransformer
            from transformers import AutoModel, AutoProcessor
            model = SentenceTransformer({str(moved)!r}, trust_remote_code=True, device="cpu")
            AutoModel.from_pretrained({str(moved)!r}, trust_remote_code=True)
            AutoProcessor.from_pretrained({str(moved)!r}, trust_remote_code=True)
            np.save({str(tmp_path / "v.npy")!r}, model.encode(["hello", "", "a longer text " * 9]))
        """
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path / "cache")}
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, cwd=tmp_path)
        np.testing.assert_allclose(np.load(tmp_path / "v.npy"), vectors[[0, 1, 7]], atol=1e-5)

    def test_needs_trust(self, repository, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        with pytest.raises(ValueError, match="trust_remote_code"):
            SentenceTransformer(str(repository))

    def test_remote_media_by_choice(self, repository):
        allowed = SentenceTransformer(
            str(repository), trust_remote_code=True, processor_kwargs={"allow_remote_media": True}
        )
        assert allowed.processor.allow_remote_media
        with pytest.raises(ValueError, match="item 0: .*could not be fetched"):
            allowed.encode({"image": "http://127.0.0.1:9/a.png"})

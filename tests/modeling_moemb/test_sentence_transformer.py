import io
import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor

from .embedders import picture, some_items


@pytest.fixture
def model(embedder):
    return embedder


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
        few = model.encode(some_items(), precision=precision, truncate_dim=10)
        assert model.encode([], precision=precision, truncate_dim=10).shape[1] == few.shape[1]

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
        # bf16 noise turns near ties of this random model's routers into other experts, hence not 0.9999 everywhere
        cosine = (low * vectors).sum(1)
        assert cosine.min() > 0.9 and np.median(cosine) > 0.995
        whole = SentenceTransformer(str(repository), trust_remote_code=True)
        for model in (half, whole):  # with every expert chosen there is nothing to flip
            for layer in model[0].auto_model.language_model.layers:
                layer.mlp.top_k = layer.mlp.experts.num_experts
        assert (half.encode(some_items()) * whole.encode(some_items())).sum(1).min() > 0.999
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
            pytest.param(object(), id="object"),  # its own name holds an address
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

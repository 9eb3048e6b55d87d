import io
import json
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
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoProcessor

from modeling_moemb.sentence_transformer_moemb import MoEMBTransformer

from ..processors import qwen_processor
from .embedders import build, picture, some_items


@pytest.fixture
def model(embedder):
    return embedder


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
        assert first[0]["kwargs"] == ["adaptive_compute", "router_task"]
        assert second["model_type"] == "SentenceTransformer" and "transformers" in second["requirements"]

    def test_changed_prompts_are_saved_for_both_routes(self, repository, tmp_path):
        model = SentenceTransformer(str(repository), trust_remote_code=True)
        model.prompts = {"query": "new: ", "document": "old: "}
        model.default_prompt_name = "document"
        model.save_pretrained(str(tmp_path / "saved"))
        processor = AutoProcessor.from_pretrained(tmp_path / "saved", trust_remote_code=True)
        loaded = SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True)
        for name in ("query", None):
            expected = loaded[0].preprocess(["a"], prompt=model.prompts[name or "document"])["input_ids"]
            assert torch.equal(processor(["a"], prompt_name=name)["input_ids"], expected)
        assert loaded[0].model.config.embedding == processor.conventions()

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
            from tests.modeling_moemb.embedders import some_items
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

"""`moemb serving` against a stand-in of vLLM: what it starts, asks, compares and reports."""

import json

import numpy as np
import pytest

from moemb.trainers import cli
from moemb.trainers.model_card_results import serving_part
from moemb.trainers.publish_plain import PlainError, export_plain, plain_config
from moemb.trainers.serving import ServingError, _row, client_snippet, sample_texts, serve_command

from .fake_vllm import environment
from .publish_cases import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_settings):
    return make_checkpoint(tmp_path_factory.mktemp("source"), tiny_settings)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").write_text("red apple\n\na small green animal\nred apple\nobeys <|im_end|>\nlast\n")
    return tmp_path / "texts"


@pytest.mark.slow
class TestAgainstAServer:
    def call(self, checkpoint, tmp_path, texts, *words) -> int:
        python = environment(tmp_path / "bin")
        given = ["--python", str(python), "--texts", str(texts), "--output", str(tmp_path / "serving.json")]
        return cli.main(["serving", "--model", str(checkpoint), *given, *words])

    def test_the_same_embedder(self, checkpoint, tmp_path, texts, capsys):
        assert self.call(checkpoint, tmp_path, texts) == 0
        report = json.loads((tmp_path / "serving.json").read_text())
        assert report["passed"] and report["dtype"] == "float32"
        rows = {row["route"]: row for row in report["routes"]}
        assert rows.keys() == {"chat messages", "token ids", "the snippet of the card"}
        for row in rows.values():
            assert row["items"] == 3 and row["lowest_cosine"] == pytest.approx(1, abs=1e-5)
        card = "\n".join(serving_part(report))
        median, lowest = (rows["chat messages"][f"{name}_cosine"] for name in ("median", "lowest"))
        assert f"| chat messages | 3 | {median:.6f} | {lowest:.6f} |" in card and "- Not run: graphics cards" in card
        assert report["server"].startswith("vllm serve NAME --runner pooling --convert embed")
        assert "| chat messages |" in (tmp_path / "serving.md").read_text()

    def test_other_vectors(self, checkpoint, tmp_path, texts, capsys, monkeypatch):
        monkeypatch.setenv("FAKE_VLLM", "wrong")
        assert self.call(checkpoint, tmp_path, texts, "--dtype", "float32") == 1
        assert "below the bounds" in capsys.readouterr().err
        assert not json.loads((tmp_path / "serving.json").read_text())["passed"]

    def test_bfloat16_where_float32_is_refused(self, checkpoint, tmp_path, texts, monkeypatch):
        monkeypatch.setenv("FAKE_VLLM", "refuse-fp32")
        self.call(checkpoint, tmp_path, texts)  # random weights may flip routes in bfloat16: the verdict is open
        report = json.loads((tmp_path / "serving.json").read_text())
        assert report["dtype"] == "bfloat16" and report["not_run"][0] == "float32, which this build of vLLM refuses"

    def test_a_server_that_never_answers(self, checkpoint, tmp_path, texts, capsys, monkeypatch):
        monkeypatch.setenv("FAKE_VLLM", "stuck")
        assert self.call(checkpoint, tmp_path, texts, "--timeout", "3", "--dtype", "float32") == 1
        assert "did not answer within 3 s" in capsys.readouterr().err


def test_no_environment(checkpoint, tmp_path, capsys):
    assert cli.main(["serving", "--model", str(checkpoint), "--python", str(tmp_path / "none")]) == 1
    assert "no environment with vLLM" in capsys.readouterr().err


def test_texts(texts, tmp_path):
    assert sample_texts(texts, 9) == ["red apple", "a small green animal", "last"]
    assert sample_texts(texts, 2) == ["red apple", "a small green animal"]
    found = sample_texts(None, 50)
    assert len(found) == len(set(found)) == 50
    with pytest.raises(ServingError, match="cannot be read"):
        sample_texts(tmp_path / "none", 3)


def test_cosines():
    ours = np.eye(3, dtype=np.float32)
    theirs = np.array([[2, 0, 0], [0, 3, 0], [0, 0.6, 0.8]], np.float32)
    row = _row("x", theirs, ours)
    assert row["median_cosine"] == pytest.approx(1) and row["lowest_cosine"] == pytest.approx(0.8)
    with pytest.raises(ServingError, match=r"shape \(3, 3\), ours are \(3, 2\)"):
        _row("x", theirs, ours[:, :2])


def test_the_snippet_and_the_command():
    compile(client_snippet("org/name"), "card", "exec")
    assert serve_command("org/name").startswith("vllm serve org/name --runner pooling --convert embed")


class TestPlain:
    def test_what_the_stock_architecture_cannot_hold(self, checkpoint, tmp_path):
        import shutil

        shutil.copytree(checkpoint, tmp_path / "copy")
        path = tmp_path / "copy" / "config.json"
        settings = json.loads(path.read_text())
        for change, said in (
            ({"pooling": "last"}, "pools 'last'"),
            ({"model_type": "qwen3_5_moe"}, "has model_type 'qwen3_5_moe'"),
        ):
            path.write_text(json.dumps(settings | change))
            with pytest.raises(PlainError, match=said):
                plain_config(tmp_path / "copy")
        path.write_text(json.dumps(settings | {"text_config": settings["text_config"] | {"num_experts": 4}}))
        with pytest.raises(PlainError, match="cannot hold this model"):
            export_plain(tmp_path / "copy", tmp_path / "plain")
        assert not (tmp_path / "plain").exists()

    def test_what_the_tokenizer_does_moves_into_the_template(self, tmp_path, tiny_settings):
        """As moemb-mini's: lower case and a leading space, which stock stacks would leave out."""
        from tokenizers import normalizers
        from transformers import AutoProcessor

        checkpoint = make_checkpoint(tmp_path, tiny_settings)
        path = checkpoint / "tokenizer.json"
        state = json.loads(path.read_text())
        steps = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend(" ")])
        state["normalizer"] = json.loads(steps.__getstate__())
        path.write_text(json.dumps(state))
        folder = export_plain(checkpoint, tmp_path / "plain")
        stock = AutoProcessor.from_pretrained(folder)

        def render(*parts):
            return stock.apply_chat_template([{"role": "user", "content": list(parts)}], tokenize=False)

        image = {"type": "image"}
        text = [{"type": "text", "text": word} for word in ("Red", " Apple", "")]
        assert render(*text) == " red apple<emb>"
        assert render(image, text[0]) == "<|vision_start|><|image_pad|><|vision_end|> red<emb>"
        assert render(text[0], image, text[1]) == " red<|vision_start|><|image_pad|><|vision_end|>  apple<emb>"
        turns = [{"role": "system", "content": "Find"}, {"role": "user", "content": "It"}]
        assert stock.apply_chat_template(turns, tokenize=False) == " find<|im_end|> it<emb>"

    def test_a_tokenizer_that_stock_stacks_read_otherwise(self, tmp_path, tiny_settings):
        from tokenizers import normalizers

        checkpoint = make_checkpoint(tmp_path, tiny_settings)
        path = checkpoint / "tokenizer.json"
        state = json.loads(path.read_text())
        state["normalizer"] = json.loads(normalizers.Replace("a", "b").__getstate__())
        path.write_text(json.dumps(state))
        with pytest.raises(PlainError, match="normalises texts by .*Replace.* which stock stacks leave out"):
            export_plain(checkpoint, tmp_path / "plain")

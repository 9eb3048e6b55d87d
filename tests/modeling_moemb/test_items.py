import base64
import io
import logging
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_moemb.items_moemb import ItemError, clean_text

from ..processors import lean_processor, qwen_processor
from .test_processing import assert_same, decoded, ids, picture


@pytest.fixture(scope="module")
def lean():
    return lean_processor()


@pytest.fixture(scope="module")
def qwen():
    return qwen_processor()


class TestItems:
    def test_dict_order_is_canonical(self, lean):
        clip = np.stack([picture(seed=index) for index in range(2)])
        one = {"text": "a", "video": clip, "image": picture()}
        other = {"image": picture(), "text": "a", "video": clip}
        assert_same(lean([one]), lean([other]))
        text = decoded(lean, one)
        assert text.index("<|image_pad|>") < text.index("<|video_pad|>") < text.index("a<emb>")

    def test_another_recorded_order(self):
        processor = qwen_processor(embedding={"order": ["text", "image", "video"]})
        text = decoded(processor, {"image": picture(), "text": "first"})
        assert text.index("first") < text.index("<|image_pad|>")
        with pytest.raises(ValueError, match="must name"):
            qwen_processor(embedding={"order": ["text"]})

    def test_document_keeps_its_order(self, lean):
        a, b = picture(seed=1), picture(32, 32, seed=2)
        pads = "<|vision_start|>{}<|vision_end|>"
        text = decoded(lean, ["one", a, "two", {"image": b}, {"type": "text", "text": "three"}])
        assert text == f"one{pads.format('<|image_pad|>' * 16)}two{pads.format('<|image_pad|>' * 4)}three<emb>"
        assert decoded(lean, ["one", "two"]) == "one\ntwo<emb>"

    def test_equal_ways_to_say_it(self, lean, tmp_path):
        image = Image.fromarray(picture())
        path = tmp_path / "a.png"
        image.save(path)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        ways = [
            image,
            picture(),
            torch.from_numpy(picture()),
            path,
            str(path),
            buffer.getvalue(),
            buffer,
            url,
            {"image": image},
            {"images": [image]},
            {"image": str(path)},
            {"image": url},
            {"bytes": buffer.getvalue()},
            [image],
            ({"type": "image", "image": image},),
            {"image": {"bytes": buffer.getvalue(), "path": None}},
            {"role": "user", "content": [{"type": "image", "image": image}]},
            [{"role": "user", "content": [{"type": "image", "path": str(path)}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            [{"role": "user", "content": [{"type": "image", "base64": url.split(",")[1]}]}],
        ]
        for way in ways:
            assert_same(lean([way]), lean([image]))

    def test_video_ways(self, lean):
        clip = np.stack([picture(seed=index) for index in range(4)])
        ways = [
            clip,
            {"video": clip},
            {"video": list(clip)},
            {"video": [Image.fromarray(f) for f in clip]},
            {"frames": clip},
            {"videos": [clip]},
            [{"video": clip}],
            {"video": {"array": clip}},
            [{"role": "user", "content": [{"type": "video", "video": clip}]}],
        ]
        for way in ways:
            assert_same(lean([way]), lean([clip]))
        assert lean([{"video": [clip, clip]}])["video_grid_thw"].tolist() == [[2, 8, 8]] * 2

    def test_one_frame_video(self, lean, qwen):
        for processor in (lean, qwen):
            features = processor([{"video": picture()[None]}])
            assert features["video_grid_thw"].tolist() == [[1, 8, 8]]
            image = processor([picture()])
            torch.testing.assert_close(features["pixel_values_videos"], image["pixel_values"])

    def test_frame_count_rule(self, lean):
        many = np.stack([np.full((64, 64, 3), index, np.uint8) for index in range(15)])
        features = lean([many])
        assert features["video_grid_thw"].tolist() == [[4, 8, 8]]
        frames = (features["pixel_values_videos"].view(4, 64, 3, 2, 64)[:, 0, 0, :, 0] * 127.5 + 127.5).flatten()
        assert frames.round().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert lean([many], num_frames=4)["video_grid_thw"].tolist() == [[2, 8, 8]]
        with pytest.raises(ValueError, match="contradict"):
            lean([many], num_frames=4, fps=1)

    def test_pixel_budget(self, lean):
        assert lean([picture(400, 400)])["image_grid_thw"].tolist() == [[1, 8, 8]]
        assert lean([picture(32, 128)])["image_grid_thw"].tolist() == [[1, 4, 16]]
        assert lean([picture(400, 400)], max_pixels=128 * 128)["image_grid_thw"].tolist() == [[1, 16, 16]]
        assert lean([picture(400, 400)], max_pixels=512)["image_grid_thw"].tolist() == [[1, 2, 2]]
        with pytest.raises(ValueError, match="above"):
            lean([picture()], min_pixels=9999, max_pixels=99)

    def test_texts_that_look_like_media(self, lean, tmp_path, monkeypatch):
        """Only an existing local media file or a whole data URL is media; nothing is ever fetched."""
        import socket

        def no_network(*args, **kwargs):
            raise AssertionError("a text reached for the network")

        monkeypatch.setattr(socket, "create_connection", no_network)
        monkeypatch.setattr(socket, "getaddrinfo", no_network)
        monkeypatch.chdir(tmp_path)
        texts = [
            "http://169.254.169.254/latest/a.png",
            "https://example.org/x.mp4",
            "missing.png",
            "data:image/png",
            "https://youtu.be/abc",
            "/etc/passwd",
            "file:///etc/hostname.png",
        ]
        for text in texts:
            assert decoded(lean, text) == f"{text}<emb>"
            assert decoded(lean, {"text": text}) == f"{text}<emb>"
        Image.fromarray(picture()).save("here.png")
        assert "pixel_values" in lean(["here.png"])
        assert decoded(lean, {"text": "here.png"}) == "here.png<emb>"
        for key in ("image", "video"):
            with pytest.raises(ItemError, match="item 0: .*allow_remote_media"):
                lean([{key: texts[0]}])
        with pytest.raises(ItemError, match="item 0: .*does not exist"):
            lean([{"image": "missing.png"}])
        chat = [{"role": "user", "content": [{"type": "image", "url": texts[0]}]}]
        for template in (None, lean.chat_template, lean.chat_template + "{# another #}"):
            with pytest.raises(ValueError, match="allow_remote_media"):
                lean.apply_chat_template([chat], template, tokenize=True, return_dict=True)
        for stock in ({"images": [[texts[0]]]}, {"videos": texts[1]}):
            with pytest.raises(ValueError, match="allow_remote_media"):
                lean(text=["a"], **stock)

    def test_blank_and_odd_texts(self, lean, caplog):
        for text in ("", " ", "\n\t", "\u200b", "\0", "\ufeff"):
            assert ids(lean, text)[-1] == lean.tokenizer.convert_tokens_to_ids("<emb>")
        with caplog.at_level(logging.WARNING):
            features = lean(["fine", "lone \ud800 surrogate", "\udfff"])
        assert "surrogates" in caplog.text
        assert lean.tokenizer.decode(features["input_ids"][1]).startswith("lone \ufffd surrogate<emb>")
        assert clean_text("\ud83d\ude00") == "\U0001f600"
        assert ids(lean, "\ud83d\ude00") == ids(lean, "\U0001f600")

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            (None, "it is None"),
            (5, r"the number 5; to embed it as text, pass str\(5\)"),
            (float("nan"), "the number nan"),
            pytest.param(object(), "it is a object", id="object"),  # its own name holds an address
            ({}, "empty mapping"),
            ([], "empty list"),
            ({"txt": "a"}, r"unknown keys \['txt'\]"),
            ({"image": None}, "'image' is None"),
            ({"text": 3}, "its text is a int"),
            ({"image": []}, "empty list"),
            (["a", None], "part 1: it is None"),
            (["a", ["b"]], "part 1: it is a list inside a document"),
            (np.full((8, 8, 3), np.nan), "NaN"),
            ({"image": b"rubbish"}, "cannot be read"),
            (b"rubbish", "cannot be read"),
            (np.zeros((3000, 8, 3), np.uint8), "aspect ratio"),
            ({"video": []}, "empty list"),
            ([{"role": "user", "content": "a"}, "b"], "mixes chat messages"),
            ([{"role": "user", "content": 3}], "content is a int"),
            ([{"role": "user", "content": [{"type": "audio"}]}], "type 'audio'"),
            ([{"role": "user", "content": [{"type": "image"}]}], "lacks its 'image'"),
            ({"role": "user", "content": "a", "tools": 1}, r"unknown keys \['tools'\]"),
            ([{"type": "image", "image": picture(), "text": "lost"}], r"type 'image' has \['text'\] besides"),
            ({"path": "/dev/null"}, "a folder, a pipe or a device"),
            (torch.empty(3, 8, 8, device="meta"), "NotImplementedError"),
        ],
        ids=str,
    )
    def test_errors_name_the_item(self, lean, item, message):
        with pytest.raises(ItemError, match=f"^item 1: .*{message}"):
            lean(["a", item])
        with pytest.raises(ItemError, match=f"^item 77: .*{message}"):
            lean([item], indices=[77])

    def test_missing_path(self, lean, tmp_path):
        with pytest.raises(ItemError, match="item 0: the file .* cannot be opened"):
            lean([tmp_path / "missing.png"])
        with pytest.raises(ItemError, match="item 0: the file .* cannot be opened"):
            lean([tmp_path])

    def test_batches(self, lean):
        single = lean("one")
        assert single["input_ids"].shape[0] == 1
        for batch in (["one", "two"], ("one", "two"), np.array(["one", "two"]), (x for x in ("one", "two"))):
            assert lean(batch)["input_ids"].shape[0] == 2
        assert lean(np.array(["one", None], dtype=object)[:1])["input_ids"].shape[0] == 1
        with pytest.raises(ValueError, match="no items"):
            lean([])
        frame = type("DataFrame", (), {"columns": ["text"], "iloc": None, "__iter__": lambda self: iter(self.columns)})
        with pytest.raises(ItemError, match="data frame"):
            lean(frame())

    def test_parts_of_one_schema(self, lean):
        """The datasets library gives every part every key, with None where there is nothing."""
        parts = [{"type": "image", "image": picture(), "text": None}, {"type": "text", "image": None, "text": "a"}]
        assert_same(lean([parts]), lean([[picture(), "a"]]))

    def test_pipe(self, lean):
        buffer = io.BytesIO()
        Image.fromarray(picture()).save(buffer, "PNG")
        reader, writer = os.pipe()
        threading.Thread(target=lambda: (os.write(writer, buffer.getvalue()), os.close(writer))).start()
        with open(reader, "rb") as file:
            assert_same(lean([file]), lean([picture()]))

    def test_unknown_arguments(self, lean):
        with pytest.raises(ValueError, match="unknown arguments"):
            lean(["a"], maxlength=3)
        for name in ("min_pixels", "max_pixels", "num_frames", "fps"):
            with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
                lean(["a"], **{name: 0})

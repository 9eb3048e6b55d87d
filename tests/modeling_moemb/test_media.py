import base64
import io
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from modeling_moemb.media_moemb import (
    MediaError,
    array_to_rgb,
    kind_of_bytes,
    load_image,
    media_kind_of_string,
)


def picture(height=6, width=10, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: Image.Image, fmt: str, **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, fmt, **settings)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


# What a viewer does with the stored pixels for each EXIF orientation.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: np.rot90(a, 1),
}


def closed_file() -> io.BytesIO:
    file = io.BytesIO(b"data")
    file.close()
    return file


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("fmt", ["PNG", "WEBP", "TIFF"])
    def test_containers(self, fmt, orientation):
        stored = picture()
        settings = {"lossless": True} if fmt == "WEBP" else {}
        data = encoded(Image.fromarray(stored), fmt, exif=exif(orientation), **settings)
        np.testing.assert_array_equal(load_image(data), UPRIGHT[orientation](stored))

    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_jpeg_and_pil(self, orientation):
        data = encoded(Image.fromarray(picture(64, 96)), "JPEG", exif=exif(orientation), quality=95)
        stored = np.asarray(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(load_image(data), UPRIGHT[orientation](stored))
        np.testing.assert_array_equal(load_image(Image.open(io.BytesIO(data))), UPRIGHT[orientation](stored))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_avif(self, orientation):
        stored = np.zeros((32, 64, 3), np.uint8)
        stored[:16, :32], stored[16:, 32:] = [255, 0, 0], [0, 0, 255]
        data = encoded(Image.fromarray(stored), "AVIF", exif=exif(orientation), quality=100)
        shown, expected = load_image(data), UPRIGHT[orientation](stored)
        assert shown.shape == expected.shape
        assert np.abs(shown.astype(int) - expected).mean() < 8

    def test_png_exif_after_pixels(self):
        """PNG may carry its EXIF chunk after the image data, where opening alone does not see it."""
        data = encoded(Image.fromarray(picture()), "PNG", exif=exif(6))
        start = data.index(b"eXIf") - 4
        length = int.from_bytes(data[start : start + 4], "big") + 12
        chunk, rest = data[start : start + length], data[:start] + data[start + length :]
        moved = rest.replace(rest[-12:], chunk + rest[-12:])
        np.testing.assert_array_equal(load_image(moved), UPRIGHT[6](picture()))


class TestModes:
    def test_transparency_lies_on_white(self):
        rgba = np.dstack([picture(), np.tile(np.array([0, 255], np.uint8), (6, 5))])
        shown = load_image(Image.fromarray(rgba, "RGBA"))
        np.testing.assert_array_equal(shown[:, ::2], 255)
        np.testing.assert_array_equal(shown[:, 1::2], rgba[:, 1::2, :3])
        assert load_image(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))[0, 0, 0] == 127

    def test_grey_alpha(self):
        image = Image.merge("LA", [Image.new("L", (2, 1), 10), Image.fromarray(np.array([[0, 255]], np.uint8))])
        np.testing.assert_array_equal(load_image(image)[0], [[255] * 3, [10] * 3])

    def test_palette_with_transparent_index(self):
        image = Image.new("P", (2, 1))
        image.putpalette([255, 0, 0, 0, 255, 0])
        image.putpixel((1, 0), 1)
        data = encoded(image, "PNG", transparency=1)
        np.testing.assert_array_equal(load_image(data)[0], [[255, 0, 0], [255, 255, 255]])
        np.testing.assert_array_equal(load_image(image)[0], [[255, 0, 0], [0, 255, 0]])

    def test_colour_key(self):
        image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
        data = encoded(image, "PNG", transparency=(4, 5, 6))
        np.testing.assert_array_equal(load_image(data)[0], [[1, 2, 3], [255, 255, 255]])

    def test_cmyk(self):
        shown = load_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
        assert (np.abs(shown.astype(int) - [255, 0, 0]) <= 3).all()

    def test_one_bit(self):
        image = Image.fromarray(np.array([[True, False]]))
        assert image.mode == "1"
        np.testing.assert_array_equal(load_image(image)[0], [[255] * 3, [0] * 3])

    @pytest.mark.parametrize("dtype", ["<u2", ">u2"])
    def test_sixteen_bit(self, dtype):
        values = np.array([[0, 257, 32896, 65535]], dtype)
        for source in (Image.fromarray(values), encoded(Image.fromarray(values.astype("<u2")), "PNG")):
            np.testing.assert_array_equal(load_image(source)[0, :, 0], [0, 1, 128, 255])
        np.testing.assert_array_equal(load_image(values.astype(np.uint16))[0, :, 0], [0, 1, 128, 255])

    def test_thirty_two_bit(self):
        np.testing.assert_array_equal(load_image(Image.fromarray(np.array([[0, 255]], np.int32)))[0, :, 0], [0, 255])
        wide = Image.fromarray(np.array([[0, 65535]], np.int32))
        np.testing.assert_array_equal(load_image(wide)[0, :, 0], [0, 255])
        with pytest.raises(MediaError, match="must lie in 0 to 255"):
            load_image(Image.fromarray(np.array([[0, 70000]], np.int32)))

    def test_float(self):
        for values, shown in (([0, 0.5, 1], [0, 128, 255]), ([0, 99, 255], [0, 99, 255])):
            image = Image.fromarray(np.array([values], "f4"))
            np.testing.assert_array_equal(load_image(image)[0, :, 0], shown)

    @pytest.mark.parametrize("mode", ["YCbCr", "HSV", "LAB"])
    def test_other_colour_spaces(self, mode):
        red = Image.new("RGB", (2, 2), (200, 40, 40))
        if mode == "LAB":
            from PIL import ImageCms

            lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
            image = ImageCms.profileToProfile(red, srgb, lab, outputMode="LAB")
        else:
            image = red.convert(mode)
        assert (np.abs(load_image(image).astype(int) - [200, 40, 40]) <= 4).all()


class TestArrays:
    def test_layouts(self):
        rgb = picture()
        for value in (rgb, torch.from_numpy(rgb), rgb.transpose(2, 0, 1), rgb.astype(np.int64), rgb.astype("f4")):
            np.testing.assert_array_equal(load_image(value), rgb)
        np.testing.assert_array_equal(load_image(rgb / 255.0), rgb)
        np.testing.assert_array_equal(load_image(torch.from_numpy(rgb / 255.0).half()), rgb)
        np.testing.assert_array_equal(load_image(rgb[..., :1]), np.repeat(rgb[..., :1], 3, -1))
        np.testing.assert_array_equal(load_image(rgb[..., 0]), np.repeat(rgb[..., :1], 3, -1))
        np.testing.assert_array_equal(load_image(rgb[..., 0] > 99)[..., 0], (rgb[..., 0] > 99) * np.uint8(255))

    def test_channels_last_wins(self):
        square = picture(3, 3)
        np.testing.assert_array_equal(load_image(square), square)

    def test_two_and_four_channels(self):
        np.testing.assert_array_equal(array_to_rgb(np.array([[[9, 0], [9, 255]]], np.uint8))[0], [[255] * 3, [9] * 3])
        np.testing.assert_array_equal(array_to_rgb(np.array([[[9, 8, 7, 255]]], np.uint8))[0], [[9, 8, 7]])

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (np.full((4, 4, 3), np.nan), "NaN"),
            (np.full((4, 4, 3), np.inf), "infinite"),
            (np.full((4, 4, 3), -1.0), "0 to 255"),
            (np.linspace(0, 1.02, 48).reshape(4, 4, 3), "either 0 to 1 with some beyond"),
            (np.full((4, 4, 3), 256), "0 to 255"),
            (np.zeros((0, 4, 3), np.uint8), "not empty"),
            (np.zeros((5, 6, 7), np.uint8), "1 to 4 colour channels"),
            (np.zeros((4,), np.uint8), "is no image"),
            (np.zeros((4, 4, 3), complex), "complex"),
        ],
    )
    def test_refused(self, value, message):
        with pytest.raises(MediaError, match=message):
            load_image(value)

    def test_rounding_beyond_the_range_is_no_range(self):
        values = np.array([[[0.0, 0.4, 1.0]]])
        np.testing.assert_array_equal(load_image(values + 1e-6), load_image(values))
        np.testing.assert_array_equal(load_image(values - 1e-6), load_image(values))

    def test_nan_tensor(self):
        with pytest.raises(MediaError, match="NaN"):
            load_image(torch.full((3, 4, 4), float("nan"), dtype=torch.bfloat16))


class TestSources:
    def test_every_source_gives_the_same_pixels(self, tmp_path):
        rgb = picture()
        data = encoded(Image.fromarray(rgb), "PNG")
        path = tmp_path / "a picture.PNG"
        path.write_bytes(data)
        b64 = base64.b64encode(data).decode()
        sources = [
            Image.fromarray(rgb),
            path,
            str(path),
            path.as_uri(),
            data,
            bytearray(data),
            memoryview(data),
            io.BytesIO(data),
            open(path, "rb"),  # noqa: SIM115
            f"data:image/png;base64,{b64}",
            f"data:image/png;base64,{b64.rstrip('=')}",
            f"data:image/png;base64,{base64.urlsafe_b64encode(data).decode()}",
            "data:image/png," + urllib.request.quote(data),
            {"bytes": data, "path": None},
            {"bytes": None, "path": str(path)},
        ]
        for source in sources:
            np.testing.assert_array_equal(load_image(source), rgb, err_msg=str(type(source)))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("nowhere.png", "does not exist"),
            (Path("nowhere.png"), "does not exist"),
            ("x" * 5000, "does not exist"),
            ("nul\0.png", "does not exist"),
            (b"no image", "cannot be read"),
            (b"", "cannot be read"),
            ("data:image/png;base64,!!!", "not valid base64"),
            ("data:image/png", "no comma"),
            (io.StringIO("text"), "mode 'rb'"),
            (closed_file(), "closed file"),
            (object(), "is no image"),
            ("https://example.org/a.png", "allow_remote_media"),
        ],
    )
    def test_refused(self, source, message):
        with pytest.raises(MediaError, match=message):
            load_image(source)

    def test_cut_off_file(self):
        data = encoded(Image.fromarray(picture(64, 64)), "PNG")
        with pytest.raises(MediaError, match="cannot be read"):
            load_image(data[: len(data) // 2])

    def test_formats_that_run_programs(self):
        with pytest.raises(MediaError, match="EPS images are not read"):
            load_image(encoded(Image.fromarray(picture()), "EPS"))

    def test_decompression_bomb(self, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
        with pytest.raises(MediaError, match="DecompressionBomb"):
            load_image(encoded(Image.fromarray(picture()), "PNG"))

    @pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG"])
    def test_first_frame_of_an_animation(self, fmt):
        frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
        data = encoded(frames[0], fmt, save_all=True, append_images=frames[1:], duration=100, lossless=True)
        assert (load_image(data) == [255, 0, 0]).all()

    def test_text_chunk_is_no_picture(self):
        info = PngImagePlugin.PngInfo()
        info.add_text("comment", "<|image_pad|>")
        np.testing.assert_array_equal(load_image(encoded(Image.fromarray(picture()), "PNG", pnginfo=info)), picture())


class TestBareStrings:
    def test_only_existing_media_files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("a.png", "b.JPEG", "c.mp4", "d.txt"):
            Path(name).write_bytes(b"x")
        assert media_kind_of_string("a.png") == "image"
        assert media_kind_of_string("b.JPEG") == "image"
        assert media_kind_of_string("c.mp4") == "video"
        for text in (
            "d.txt",
            "missing.png",
            "",
            "a.png ",
            "https://example.org/a.png",
            "https://youtu.be/x",
            "\0.png",
        ):
            assert media_kind_of_string(text) is None

    def test_data_urls_must_be_whole(self):
        assert media_kind_of_string("data:image/png;base64,AAAA") == "image"
        assert media_kind_of_string("data:video/mp4;base64,AAAA") == "video"
        for text in (
            "data:image/png",
            "data:text/plain;base64,AAAA",
            "see data:image/png;base64,AAAA",
            "data:image/png;base64,AAAA!",
            "data:image/png;base64,",
        ):
            assert media_kind_of_string(text) is None


def test_kind_of_bytes():
    assert kind_of_bytes(encoded(Image.new("RGB", (2, 2)), "GIF")) == "image"
    assert kind_of_bytes(b"\0\0\0\x18ftypmp42") == "video"


class _Handler(BaseHTTPRequestHandler):
    hits: list[str] = []

    def do_GET(self):
        self.hits.append(self.path)
        if self.path == "/away.png":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/a.png")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/a.png" else 404)
        self.end_headers()
        if self.path == "/a.png":
            self.wfile.write(encoded(Image.fromarray(picture()), "PNG"))

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), _Handler) as http:
        _Handler.hits = []
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


class TestRemote:
    def test_only_when_allowed(self, server):
        with pytest.raises(MediaError, match="nothing is fetched unless you allow it"):
            load_image(f"{server}/a.png")
        assert _Handler.hits == []
        np.testing.assert_array_equal(load_image(f"{server}/a.png", allow_remote=True), picture())
        assert _Handler.hits == ["/a.png"]

    def test_failures(self, server):
        with pytest.raises(MediaError, match="could not be fetched"):
            load_image(f"{server}/missing.png", allow_remote=True)
        with pytest.raises(MediaError, match="not http"):
            load_image(f"{server}/away.png", allow_remote=True)

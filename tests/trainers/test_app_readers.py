"""What of a file is embedded, and what is said of a file that cannot be."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from modeling_moemb.media_moemb import load_image
from modeling_moemb.video_moemb import FrameSampling
from moemb.trainers import rag_readers
from moemb.trainers.rag_clips import clock
from moemb.trainers.rag_files import FileState, kind_of_name
from moemb.trainers.rag_readers import ReadSettings, UnreadableError, load_picture, open_file

from .rag_samples import BLUE, GREEN, RED, gif, pdf, picture, png, write_video


def read(folder, name, wanted=lambda digest, unit: True, **settings):
    state = FileState(name, (folder / name).stat().st_size, 0, kind_of_name(name))
    opened = open_file(folder, state, ReadSettings(**settings), FrameSampling(num_frames=4), wanted)
    return list(opened.units), opened.problems


def test_a_picture_is_the_pixels_the_processor_would_read(tmp_path):
    image = Image.effect_noise((120, 80), 60).convert("RGB")
    image.save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    (unit,), problems = read(tmp_path, "a.jpg", thumbnail_pixels=40)
    assert np.array_equal(unit.item["image"], load_image(tmp_path / "a.jpg")) and not problems
    assert unit.item["image"].shape == (120, 80, 3)  # turned, as its EXIF says
    with Image.open(io.BytesIO(unit.thumbnail)) as small:
        assert small.format == "WEBP" and max(small.size) == 40


def test_an_animated_picture_is_a_clip(tmp_path):
    (tmp_path / "a.gif").write_bytes(gif([RED, BLUE, GREEN]))
    (unit,), _ = read(tmp_path, "a.gif")
    assert unit.modality == "clip"
    with Image.open(io.BytesIO(unit.thumbnail)) as moving:
        assert moving.n_frames == 3


def test_pages_and_the_text_on_them(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(["apples and pears", "plums"]))
    units, problems = read(tmp_path, "a.pdf", page_pixels=200)
    assert [(u.modality, u.part, u.page, u.place, u.text) for u in units] == [
        ("page", 1, 1, "page 1 of 2", "apples and pears"),
        ("text", 1, 1, "page 1 of 2", "apples and pears"),
        ("page", 2, 2, "page 2 of 2", "plums"),
        ("text", 2, 2, "page 2 of 2", "plums"),
    ]
    assert units[0].item["image"].shape[0] == 200 and not problems
    assert np.ptp(units[0].item["image"]) > 100  # black letters on white
    only_pages, _ = read(tmp_path, "a.pdf", pdf_text=False)
    assert [unit.modality for unit in only_pages] == ["page", "page"]


def test_one_page_that_cannot_be_drawn_leaves_the_others(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(pdf(["one", "two", "three"]))
    draw = rag_readers.Pdf.render

    def broken(self, number, longer_side):
        if number == 2:
            raise UnreadableError("it cannot be drawn")
        return draw(self, number, longer_side)

    monkeypatch.setattr(rag_readers.Pdf, "render", broken)
    units, problems = read(tmp_path, "a.pdf", pdf_text=False)
    assert [unit.page for unit in units] == [1, 3] and problems == ["page 2: it cannot be drawn"]


def test_a_long_video_becomes_stretches_with_their_own_frames(tmp_path):
    colours = [RED, GREEN, BLUE, RED, GREEN, BLUE]
    write_video(tmp_path / "a.mp4", colours, seconds=1.0)
    units, _ = read(tmp_path, "a.mp4", clip_seconds=2)
    assert [(unit.part, unit.start, unit.place) for unit in units] == [
        (1, 0.0, "0:00–0:02 min"), (2, 2.0, "0:02–0:04 min"), (3, 4.0, "0:04–0:06 min"),
    ]  # fmt: skip
    for unit, pair in zip(units, (colours[:2], colours[2:4], colours[4:]), strict=True):
        frames = unit.item["video"]["frames"]
        assert frames.shape == (4, 48, 64, 3)
        assert np.abs(frames[0].mean(axis=(0, 1)) - pair[0]).max() < 12
        assert np.abs(frames[-1].mean(axis=(0, 1)) - pair[1]).max() < 12


def test_a_short_video_is_handed_over_as_its_path(tmp_path):
    write_video(tmp_path / "a.mp4", [RED, BLUE])
    (unit,), _ = read(tmp_path, "a.mp4", clip_seconds=30)
    assert unit.item == {"video": tmp_path / "a.mp4"} and unit.start == 0


def test_what_is_in_the_index_is_not_decoded_again(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(["one", "two"]))
    units, _ = read(tmp_path, "a.pdf", wanted=lambda digest, unit: unit == ("page", 2))
    assert [unit.name for unit in units] == [("page", 2)]


BROKEN = {
    "half.png": (png(RED, (400, 400))[:300], "image"),
    "not.jpg": (b"this is no picture", "no picture"),
    "corrupt.pdf": (pdf(["a"])[:120].replace(b"obj", b"obx"), "no PDF"),
    "not.pdf": (b"%PDF-1.7 and nothing more", "no PDF"),
    "not.mp4": (b"\0\0\0\x18ftypmp42 and nothing more", "video"),
    "binary.txt": (b"\x7fELF\0\0\0", "zero bytes"),
    "blank.md": (b" \n\n \t", "white space"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_what_is_wrong(tmp_path, name):
    data, words = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnreadableError, match=words):
        read(tmp_path, name)


def test_a_pdf_with_a_password_says_so(tmp_path, monkeypatch):
    import pypdfium2

    def refuse(data):
        raise pypdfium2.PdfiumError("Failed to load document (PDFium: Incorrect password error).")

    monkeypatch.setattr(pypdfium2, "PdfDocument", refuse)
    (tmp_path / "a.pdf").write_bytes(pdf(["a"]))
    with pytest.raises(UnreadableError, match="password"):
        read(tmp_path, "a.pdf")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(RED))

    def refuse(self):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(type(tmp_path), "read_bytes", refuse)
    with pytest.raises(UnreadableError, match="Permission denied"):
        read(tmp_path, "a.png")


def test_huge_pictures_are_halved_until_they_fit(monkeypatch):
    monkeypatch.setattr(rag_readers, "_WHOLE_PICTURE_PIXELS", 10_000)
    for form in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        picture(RED, (400, 300)).save(buffer, form)
        small = load_picture(buffer.getvalue())
        assert small.shape == (75, 100, 3)
        assert np.abs(small.mean(axis=(0, 1)) - RED).max() < 4


def test_a_picture_made_to_exhaust_memory_is_refused_before_it_is_decoded():
    # a PNG header that promises 30,000 x 30,000 pixels
    head = bytearray(png(RED))
    head[16:24] = (30_000).to_bytes(4, "big") * 2
    import zlib

    head[29:33] = zlib.crc32(bytes(head[12:29])).to_bytes(4, "big")
    with pytest.raises(UnreadableError, match="million pixels"):
        load_picture(bytes(head))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (67, "1:07"), (3725, "1:02:05")])
def test_times_as_people_write_them(seconds, text):
    assert clock(seconds) == text

import numpy as np
import pytest
from PIL import Image, ImageFont

from moemb.trainers.corpus_render import (
    MOTIONS,
    STRIP_EVALUATION_FONT,
    motion_clip,
    on_white,
    render_all,
    render_strip,
    render_svg,
    strip_fits,
)


SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 {height}">'
    '<rect width="16" height="{height}" fill="#f00"/></svg>'
)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fonts")
    for name in (STRIP_EVALUATION_FONT[0], "Other.ttf"):
        (folder / name).write_bytes(ImageFont.load_default(11).path.getvalue())
    return folder


def test_a_drawing_comes_out_the_same_each_time():
    first = render_svg(SVG.format(height=32))
    assert first.shape == (64, 64, 3) and first.dtype == np.uint8
    assert (first[:, :28] == (255, 0, 0)).all() and (first[:, 36:] == 255).all()
    assert np.array_equal(first, render_svg(SVG.format(height=32)))


def test_what_shows_nothing_or_is_no_svg_is_none():
    assert render_svg('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"/>') is None
    assert render_svg("<svg") is None


def test_render_all_keeps_the_order_with_one_worker_and_with_two():
    svgs = [SVG.format(height=32), "<svg", SVG.format(height=16)]
    alone, together = list(render_all(svgs, "test")), list(render_all(svgs, "test", workers=2))
    assert alone[1] is None and together[1] is None
    for number in (0, 2):
        assert np.array_equal(alone[number], together[number])


def test_pictures_are_centred_on_white_without_distortion():
    wide = on_white(Image.new("RGBA", (40, 20), (0, 0, 0, 255)))
    assert (wide[:15] == 255).all() and (wide[17:47] == 0).all() and (wide[49:] == 255).all()
    assert (on_white(Image.new("RGBA", (20, 20), (0, 0, 0, 0))) == 255).all()
    assert (on_white(Image.new("L", (1, 500), 0)) < 255).any()


def ink_centre(frame):
    ink = 255.0 - frame.mean(2)
    rows, columns = np.indices(ink.shape)
    return (rows * ink).sum() / ink.sum(), (columns * ink).sum() / ink.sum()


def test_motions_move_as_they_are_called():
    picture = np.full((64, 64, 3), 255, np.uint8)
    picture[8:56, 8:40] = (200, 30, 60)
    clips = {kind: motion_clip(picture, kind) for kind in MOTIONS}
    assert len(MOTIONS) == 8 and all(
        clip.shape == (8, 64, 64, 3) and clip.dtype == np.uint8 for clip in clips.values()
    )
    start, stop = {}, {}
    for kind, clip in clips.items():
        start[kind], stop[kind] = ink_centre(clip[0]), ink_centre(clip[-1])
    assert stop["moving left"][1] < start["moving left"][1] - 20
    assert stop["moving right"][1] > start["moving right"][1] + 20
    assert stop["moving up"][0] < start["moving up"][0] - 20
    assert stop["moving down"][0] > start["moving down"][0] + 20
    assert (255 - clips["growing"][-1]).sum() > 4 * (255.0 - clips["growing"][0]).sum()
    assert np.array_equal(clips["growing"][0], clips["shrinking"][-1])
    # The ink leans to the left; a quarter turn clockwise brings it up, counterclockwise down.
    assert ink_centre(clips["rotating clockwise"][3])[0] < 31 < ink_centre(clips["rotating counterclockwise"][3])[0]
    assert motion_clip(picture, "growing", frames=3).shape == (3, 64, 64, 3)
    assert np.array_equal(clips["growing"], motion_clip(picture, "growing"))


def test_an_unknown_motion_is_named():
    with pytest.raises(ValueError, match=r"'jumping'.*moving left"):
        motion_clip(np.zeros((64, 64, 3), np.uint8), "jumping")


def test_strips_are_fixed_without_rng_and_vary_with_it(fonts):
    plain = render_strip("hydrated aluminum oxide", None, fonts)
    assert plain.shape == (32, 128, 3) and plain.dtype == np.uint8 and plain.min() == 0
    assert np.array_equal(plain, render_strip("hydrated aluminum oxide", None, fonts))
    drawn = [render_strip("hydrated aluminum oxide", np.random.default_rng(seed), fonts) for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])
    assert not np.array_equal(plain, render_strip("another thing", None, fonts))


def test_long_titles_wrap_to_two_lines_and_fitting_is_known(fonts):
    two = render_strip("the hydrated aluminum oxide of old", None, fonts)
    assert (two[16:] < 128).any()
    assert strip_fits("hydrated aluminum oxide", fonts)
    assert not strip_fits(" ", fonts)
    assert not strip_fits("incomprehensibilities of counterrevolutionaries and internationalization", fonts)
    assert not strip_fits("x" * 60, fonts)


def test_missing_fonts_are_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="moemb data"):
        render_strip("title", None, tmp_path)

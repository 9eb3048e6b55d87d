"""Pixels: SVG drawings on white, clips with motion, and headings set in type. All of it deterministic."""

import io
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm.auto import tqdm

from .corpus_sources import default_corpus_folder


IMAGE_SIZE = 64
CLIP_FRAMES = 8
MOTIONS = (
    "moving left", "moving right", "moving up", "moving down", "growing", "shrinking", "rotating clockwise",
    "rotating counterclockwise",
)  # fmt: skip
STRIP_HEIGHT, STRIP_WIDTH = 32, 128
STRIP_SIZES = (10, 11, 12)
STRIP_EVALUATION_FONT = ("DejaVuSans.ttf", 11)
_WHITE = (255, 255, 255)


def on_white(image: Image.Image, size: int = IMAGE_SIZE) -> np.ndarray:
    """A picture scaled to fit a white square.

    Args:
        image (`PIL.Image.Image`):
            Any mode; what is transparent becomes white.
        size (`int`, *optional*, defaults to 64):
            Side of the square in pixels.

    Returns:
        `np.ndarray` of shape `(size, size, 3)`, uint8.
    """
    image = image.convert("RGBA")
    flat = Image.new("RGBA", image.size, (*_WHITE, 255))
    flat.alpha_composite(image)
    scale = size / max(image.size)
    fitted = flat.convert("RGB").resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS)
    square = Image.new("RGB", (size, size), _WHITE)
    square.paste(fitted, ((size - fitted.width) // 2, (size - fitted.height) // 2))
    return np.asarray(square)


def render_svg(svg: str) -> np.ndarray | None:
    """An SVG document as `(64, 64, 3)` uint8 on white, or `None` when it cannot be drawn or shows nothing.

    Drawn at twice the size and scaled down. Fonts of the system are never used, so the pixels do not depend on the
    machine.
    """
    import resvg_py

    try:
        # dpi=0, the default, makes every length in pt or mm invalid.
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * IMAGE_SIZE, dpi=96.0, skip_system_fonts=True)
        pixels = on_white(Image.open(io.BytesIO(bytes(png))))
    except (ValueError, OSError):
        return None
    return pixels if pixels.std() >= 1 else None


def render_all(svgs: list[str], description: str, workers: int = 1) -> Iterator[np.ndarray | None]:
    """`render_svg` over a list, in its order, under a progress bar; on `workers` processes when more than one."""
    bar = {"total": len(svgs), "desc": description, "unit": "image", "mininterval": 0.5}
    if workers <= 1:
        yield from tqdm(map(render_svg, svgs), **bar)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from tqdm(pool.imap(render_svg, svgs, chunksize=64), **bar)


def motion_clip(image: np.ndarray, kind: str, frames: int = CLIP_FRAMES) -> np.ndarray:
    """A short clip in which a picture moves.

    Args:
        image (`np.ndarray` of shape `(64, 64, 3)`, uint8):
            The picture, on white.
        kind (`str`):
            One of `MOTIONS`.
        frames (`int`, *optional*, defaults to 8):
            Number of frames.

    Returns:
        `np.ndarray` of shape `(frames, 64, 64, 3)`, uint8.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in MOTIONS:
        raise ValueError(f"unknown motion {kind!r}; one of {', '.join(MOTIONS)}")
    side = image.shape[0]
    picture = Image.fromarray(image)
    clip = np.empty((frames, *image.shape), np.uint8)
    for index, time in enumerate(np.linspace(0.0, 1.0, frames)):
        size = {"growing": round(14 + 46 * time), "shrinking": round(60 - 46 * time)}.get(kind, 30)
        free = side - size
        x = y = free // 2
        if kind == "moving left":
            x = round(free * (1 - time))
        elif kind == "moving right":
            x = round(free * time)
        elif kind == "moving up":
            y = round(free * (1 - time))
        elif kind == "moving down":
            y = round(free * time)
        small = picture.resize((size, size), Image.Resampling.LANCZOS)
        if kind.startswith("rotating"):
            sign = -1 if kind == "rotating clockwise" else 1
            small = small.rotate(sign * 180 * time, resample=Image.Resampling.BILINEAR, fillcolor=_WHITE)
        frame = Image.new("RGB", (side, side), _WHITE)
        frame.paste(small, (x, y))
        clip[index] = frame
    return clip


@lru_cache(maxsize=64)
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=8)
def strip_font_files(folder: Path) -> tuple[Path, ...]:
    """The font files a corpus folder holds, sorted by name.

    Raises:
        FileNotFoundError: if there are none.
    """
    files = tuple(sorted(folder.glob("*.ttf")))
    if not files:
        raise FileNotFoundError(f"no fonts in {folder}: run `moemb data` to build the corpus")
    return files


def _lines(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if not lines[-1] or font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def strip_fits(text: str, font_folder: Path) -> bool:
    """Whether a text shows whole on a strip in the evaluation font: at most two lines, none cut off."""
    font = _font(font_folder / STRIP_EVALUATION_FONT[0], STRIP_EVALUATION_FONT[1])
    lines = _lines(text, font, STRIP_WIDTH - 4)
    return bool(text.strip()) and len(lines) <= 2 and all(font.getlength(line) <= STRIP_WIDTH - 4 for line in lines)


def render_strip(text: str, rng: np.random.Generator | None = None, font_folder: Path | None = None) -> np.ndarray:
    """A heading set in type on a white strip, wrapped to two lines.

    Args:
        text (`str`):
            The heading.
        rng (`np.random.Generator`, *optional*):
            Draws font, size, place and ink. Without it the strip is set in DejaVu Sans 11, the evaluation font, in
            black.
        font_folder (`Path`, *optional*):
            Folder of `.ttf` files. Defaults to that of the default corpus.

    Returns:
        `np.ndarray` of shape `(32, 128, 3)`, uint8.

    Raises:
        FileNotFoundError: if the folder holds no fonts.
    """
    if font_folder is None:
        font_folder = default_corpus_folder() / "fonts"
    if rng is None:
        strip_font_files(font_folder)
        font, (x, y), ink = _font(font_folder / STRIP_EVALUATION_FONT[0], STRIP_EVALUATION_FONT[1]), (2, 2), 0
    else:
        files = strip_font_files(font_folder)
        font = _font(files[rng.integers(len(files))], STRIP_SIZES[rng.integers(len(STRIP_SIZES))])
        x, y, ink = int(rng.integers(0, 6)), int(rng.integers(0, 5)), int(rng.integers(0, 61))
    strip = Image.new("L", (STRIP_WIDTH, STRIP_HEIGHT), 255)
    draw = ImageDraw.Draw(strip)
    for number, line in enumerate(_lines(text, font, STRIP_WIDTH - 4)[:2]):
        draw.text((x, y + 14 * number), line, fill=ink, font=font)
    return np.repeat(np.asarray(strip)[:, :, None], 3, axis=2)

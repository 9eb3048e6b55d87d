"""What of a file is embedded: a picture, pages and passages of a PDF, passages of a text, stretches of a video.

A picture, and a video no longer than `clip_seconds`, get the vector that `encode_document` gives their path. Two
things are cut down first, since nobody would search them whole: a longer video becomes consecutive stretches, and a
picture of more than 50 million pixels is halved by Pillow until it has fewer.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from modeling_moemb.media_moemb import MediaError, pil_to_rgb
from modeling_moemb.video_moemb import FrameSampling, load_video

from .rag_clips import clip_stretches, clock
from .rag_files import HTML_EXTENSIONS, FileState, digest_of
from .rag_pdf import Pdf, UnreadableError
from .rag_text import decode_text, html_to_text, split_passages


MODALITIES = ("image", "page", "text", "clip")
_WHOLE_PICTURE_PIXELS = 50_000_000
_TEXT_BYTES = 32 * 2**20
_FILE_BYTES = 2**30
_EXCERPT_CHARACTERS = 400
_THUMBNAIL_QUALITY = 80
_THUMBNAIL_FRAMES = 6
_THUMBNAIL_MILLISECONDS = 320


@dataclass(frozen=True)
class ReadSettings:
    """
    How files are read.

    Args:
        passage_characters (`int`, *optional*, defaults to 600): most characters of a passage.
        page_pixels (`int`, *optional*, defaults to 1024): longer side of a rendered page.
        pdf_text (`bool`, *optional*, defaults to `True`): index the text layer of pages beside their picture.
        clip_seconds (`float`, *optional*, defaults to 30.0): longest stretch of a video that is one result.
        thumbnail_pixels (`int`, *optional*, defaults to 320): longer side of a thumbnail.
    """

    passage_characters: int = 600
    page_pixels: int = 1024
    pdf_text: bool = True
    clip_seconds: float = 30.0
    thumbnail_pixels: int = 320


@dataclass(frozen=True)
class Unit:
    """
    Something that is embedded and found.

    Args:
        modality (`str`): one of `MODALITIES`.
        part (`int`): number inside the file, from 1: of the page, the passage or the stretch.
        item: what `encode_document` takes.
        place (`str`, *optional*): where in the file it is, for people, such as `"page 3 of 12"`.
        text (`str`, *optional*): the passage, or the beginning of a page's text.
        thumbnail (`bytes`, *optional*): WebP, empty for texts.
        page (`int`, *optional*): page of a PDF, from 1; 0 elsewhere.
        start (`float`, *optional*): seconds into a video.
        cost (`int`, *optional*): pixels of the item, which bounds what is held at once.
    """

    modality: str
    part: int
    item: Any
    place: str = ""
    text: str = ""
    thumbnail: bytes = b""
    page: int = 0
    start: float = 0.0
    cost: int = 0

    @property
    def name(self) -> tuple[str, int]:
        """`tuple[str, int]`: modality and part, unique inside a file."""
        return self.modality, self.part


@dataclass
class OpenedFile:
    """
    A file that is being read.

    Args:
        digest (`str`): hash of its content.
        units (`Iterator[Unit]`): what is embedded, read as it is asked for. Raises [`UnreadableError`].
        problems (`list[str]`): parts that could not be read, such as one page; filled while `units` is consumed.
    """

    digest: str
    units: Iterator[Unit]
    problems: list[str] = field(default_factory=list)


def open_file(
    root: Path,
    state: FileState,
    settings: ReadSettings,
    sampling: FrameSampling,
    wanted: Callable[[str, tuple[str, int]], bool] = lambda digest, name: True,
) -> OpenedFile:
    """
    Begins to read a file.

    Args:
        root (`Path`): the indexed folder.
        state (`FileState`): the file.
        settings (`ReadSettings`): how to read.
        sampling (`FrameSampling`): which frames of a stretch the model looks at.
        wanted (`Callable`, *optional*): asked with the digest and a unit's name whether to read it; units that are
            in the index already are left out without being decoded.

    Returns:
        [`OpenedFile`]

    Raises:
        UnreadableError: the file is gone, may not be read, or is too large.
    """
    path = root / state.path
    try:
        if state.kind == "clip":
            digest = digest_of(path)
            opened = OpenedFile(digest, iter(()))
            opened.units = _guarded(_clip_units(path, settings, sampling, lambda name: wanted(digest, name)))
            return opened
        if state.size > _FILE_BYTES:
            raise UnreadableError(f"it has {state.size / 1e9:.1f} GB; at most {_FILE_BYTES / 1e9:.1f} GB are read")
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"it cannot be opened: {error.strerror or error}") from error
    opened = OpenedFile(digest_of(data), iter(()))

    def take(name: tuple[str, int]) -> bool:
        return wanted(opened.digest, name)

    if state.kind == "image":
        opened.units = _guarded(_image_units(data, settings, take))
    elif state.kind == "pdf":
        opened.units = _guarded(_pdf_units(data, settings, take, opened.problems))
    else:
        opened.units = _guarded(_text_units(data, state.path, settings, take))
    return opened


def _guarded(units: Iterator[Unit]) -> Iterator[Unit]:
    """Whatever a decoder raises about a file becomes one kind of error: a folder must not end at a broken file."""
    try:
        yield from units
    except UnreadableError:
        raise
    except MemoryError as error:
        raise UnreadableError("there is not enough memory to decode it") from error
    except OSError as error:
        raise UnreadableError(f"it cannot be read: {error.strerror or error}") from error
    except (MediaError, ValueError) as error:
        raise UnreadableError(str(error)) from error
    except Exception as error:
        raise UnreadableError(f"it cannot be read: {type(error).__name__}: {error}") from error


def load_picture(source: bytes | Path) -> np.ndarray:
    """
    Decodes a picture, however large.

    Args:
        source (`bytes` or `Path`): the encoded picture.

    Returns:
        `np.ndarray`: uint8 `[H, W, 3]`, of at most 50 million pixels.

    Raises:
        UnreadableError: it is no picture, is broken, or has more pixels than Pillow takes for harmless (179 million).
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            width, height = image.size
            if width * height > _WHOLE_PICTURE_PIXELS:
                factor = 2
                while width * height > _WHOLE_PICTURE_PIXELS * factor * factor:
                    factor *= 2
                # JPEG decodes at a fraction of its size; the rest is decoded whole, in one byte a channel.
                image.draft("RGB", (width // factor, height // factor))
                image.thumbnail((max(1, width // factor), max(1, height // factor)))
            return pil_to_rgb(image)
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UnreadableError(
            f"it has more than {most / 1e6:.0f} million pixels, as files made to exhaust memory have; scale it down"
        ) from error
    except MediaError as error:
        raise UnreadableError(str(error)) from error
    except Exception as error:
        raise UnreadableError(f"it is no picture that can be read: {type(error).__name__}: {error}") from error


def _image_units(data: bytes, settings: ReadSettings, take: Callable) -> Iterator[Unit]:
    frames = _number_of_frames(data)
    if frames > 1:
        if take(("clip", 1)):
            yield whole_clip(data, settings)
        return
    if take(("image", 1)):
        picture = load_picture(data)
        place = f"{picture.shape[1]:,} × {picture.shape[0]:,} px"
        shown = thumbnail([picture], settings.thumbnail_pixels)
        yield Unit("image", 1, {"image": picture}, place, thumbnail=shown, cost=picture.size)


def _number_of_frames(data: bytes) -> int:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1)
    except Exception:
        return 1  # what is wrong with it is said where it is decoded


def whole_clip(source: bytes | Path, settings: ReadSettings) -> Unit:
    """Returns the unit of a short video or an animated picture."""
    shown = load_video(source, FrameSampling(num_frames=_THUMBNAIL_FRAMES))
    frames, height, width, _ = shown.frames.shape
    place = f"{clock(float(shown.times[-1]))} min" if frames > 1 else ""
    picture = thumbnail(list(shown.frames), settings.thumbnail_pixels)
    return Unit("clip", 1, {"video": source}, place, thumbnail=picture, cost=frames * height * width * 3)


def _clip_units(path: Path, settings: ReadSettings, sampling: FrameSampling, take: Callable) -> Iterator[Unit]:
    stretches = clip_stretches(path, settings.clip_seconds, sampling)
    if stretches is None:
        if take(("clip", 1)):
            yield whole_clip(path, settings)
        return
    for part, stretch in enumerate(stretches, start=1):
        if not take(("clip", part)):
            continue
        chosen = np.linspace(0, len(stretch.frames) - 1, min(_THUMBNAIL_FRAMES, len(stretch.frames))).astype(int)
        yield Unit(
            "clip",
            part,
            {"video": {"frames": stretch.frames, "fps": stretch.rate}},
            f"{clock(stretch.start)}–{clock(stretch.end)} min",
            thumbnail=thumbnail([stretch.frames[index] for index in chosen], settings.thumbnail_pixels),
            start=stretch.start,
            cost=stretch.frames.size,
        )


def _text_units(data: bytes, name: str, settings: ReadSettings, take: Callable) -> Iterator[Unit]:
    if len(data) > _TEXT_BYTES:
        raise UnreadableError(f"it has {len(data) / 1e6:.0f} MB of text; at most {_TEXT_BYTES / 1e6:.0f} are read")
    text = decode_text(data)
    if name.lower().endswith(HTML_EXTENSIONS):
        text = html_to_text(text)
    passages = split_passages(text, settings.passage_characters)
    if not passages:
        raise UnreadableError("it holds no text, only white space")
    for part, passage in enumerate(passages, start=1):
        if take(("text", part)):
            place = f"passage {part} of {len(passages)}" if len(passages) > 1 else ""
            yield Unit("text", part, {"text": passage}, place, text=passage)


def _pdf_units(data: bytes, settings: ReadSettings, take: Callable, problems: list[str]) -> Iterator[Unit]:
    with Pdf(data) as document:
        if not document.pages:
            raise UnreadableError("it is a PDF without pages")
        found, part = 0, 0
        for page in range(1, document.pages + 1):
            place = f"page {page} of {document.pages}"
            text = document.text(page)
            try:
                if take(("page", page)):
                    picture = document.render(page, settings.page_pixels)
                    shown = thumbnail([picture], settings.thumbnail_pixels)
                    excerpt = " ".join(text.split())[:_EXCERPT_CHARACTERS]
                    yield Unit("page", page, {"image": picture}, place, excerpt, shown, page, cost=picture.size)
                found += 1
            except UnreadableError as error:
                problems.append(f"page {page}: {error}")
                continue
            for passage in split_passages(text, settings.passage_characters) if settings.pdf_text else ():
                part += 1
                if take(("text", part)):
                    yield Unit("text", part, {"text": passage}, place, text=passage, page=page)
        if not found:
            raise UnreadableError(f"none of its {document.pages} pages can be read ({problems[0]})")


def thumbnail(frames: list[np.ndarray], pixels: int) -> bytes:
    """
    Makes a small picture, or a moving one of several frames.

    Args:
        frames (`list[np.ndarray]`): uint8 `[H, W, 3]`, at least one.
        pixels (`int`): longer side; a smaller picture keeps its size.

    Returns:
        `bytes`: WebP.
    """
    images = [Image.fromarray(frame) for frame in frames]
    for image in images:
        image.thumbnail((pixels, pixels))
    buffer = io.BytesIO()
    moving = {"save_all": True, "append_images": images[1:], "duration": _THUMBNAIL_MILLISECONDS, "loop": 0}
    images[0].save(buffer, "WEBP", quality=_THUMBNAIL_QUALITY, **(moving if len(images) > 1 else {}))
    return buffer.getvalue()

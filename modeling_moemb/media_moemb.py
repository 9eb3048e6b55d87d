"""Pictures of every kind a user may hand over, decoded to what they look like: uint8 RGB.

Nothing here guesses in silence. What cannot be read raises [`MediaError`], and nothing is fetched over a network
unless the caller passed `allow_remote=True`.
"""

import base64
import binascii
import io
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps


IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".apng", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".avif")
VIDEO_EXTENSIONS = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".wmv", ".flv", ".mpg", ".mpeg")
# Transparent pixels show the page behind them, and pages are white.
BACKGROUND = (255, 255, 255)
REMOTE_TIMEOUT_SECONDS = 20
REMOTE_MAX_BYTES = 256 * 2**20

# Pillow draws these by running a program or a system library: nothing for files that others sent.
_REFUSED_FORMATS = ("EPS", "WMF")
# What rounding to 8 bits hides in floats from 0 to 1.
_HALF_LEVEL = 0.5 / 255
_DATA_URL = re.compile(r"data:(image|video)/[\w.+-]+(?:;[\w=.+-]+)*;base64,[A-Za-z0-9+/=_\s-]+", re.IGNORECASE)
_HTTP = ("http://", "https://")


class MediaError(ValueError):
    """A picture or video that cannot be read. The message says what it was and what to do."""


def media_kind_of_string(text: str) -> str | None:
    """
    Says whether a bare string stands for a picture or a video.

    It does when it is the path of an existing local file with a media extension, or a complete base64 data URL. Every
    other string is text, URLs included.

    Args:
        text (`str`):
            The string.

    Returns:
        `str` or `None`: `"image"`, `"video"`, or `None` for text.
    """
    ending = text[-6:].lower()
    for kind, extensions in (("image", IMAGE_EXTENSIONS), ("video", VIDEO_EXTENSIONS)):
        if ending.endswith(extensions) and os.path.isfile(text):
            return kind
    if text[:5].lower() == "data:" and (match := _DATA_URL.fullmatch(text)):
        return match.group(1).lower()
    return None


def kind_of_bytes(data: bytes) -> str:
    """Returns `"image"` if Pillow knows the format of an encoded file, else `"video"`."""
    try:
        with Image.open(io.BytesIO(data)):
            return "image"
    except Exception:
        return "video"


def read_source(value: Any, kind: str, allow_remote: bool = False) -> bytes | Path | None:
    """
    Finds the encoded file behind a value.

    Args:
        value:
            Path (`str` or `Path`), `file://` URL, data URL, http(s) URL, bytes, readable file object, or a mapping
            with `bytes` or `path` (the form of the `datasets` library).
        kind (`str`):
            `"image"` or `"video"`, for the messages.
        allow_remote (`bool`, *optional*, defaults to `False`):
            Whether http(s) URLs may be fetched.

    Returns:
        `bytes`, `Path` or `None`: the file's content or its path; `None` when the value is not such a source.

    Raises:
        MediaError: the file is missing, the URL is refused or the data URL is broken.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict) and set(value) <= {"bytes", "path"} and (value.get("bytes") or value.get("path")):
        return bytes(value["bytes"]) if value.get("bytes") else _existing(Path(value["path"]), kind)
    if isinstance(value, os.PathLike):
        return _existing(Path(value), kind)
    if isinstance(value, str):
        return _read_string(value, kind, allow_remote)
    if hasattr(value, "read") and not isinstance(value, Image.Image):
        return read_file_object(value)
    return None


def read_file_object(file: Any) -> bytes:
    """Reads an open file from its start, or a pipe from where it is."""
    try:
        if hasattr(file, "seek") and (not hasattr(file, "seekable") or file.seekable()):
            file.seek(0)
        data = file.read()
    except (OSError, ValueError) as error:
        raise MediaError(f"the file object {file!r} cannot be read: {error}") from error
    if not isinstance(data, bytes):
        raise MediaError(f"the file object {file!r} gives text, not bytes: open it with mode 'rb'")
    return data


def _read_string(value: str, kind: str, allow_remote: bool) -> bytes | Path:
    if value[:5].lower() == "data:":
        return _read_data_url(value)
    if value.lower().startswith(_HTTP):
        if not allow_remote:
            refuse_remote(value, kind)
        return _fetch(value)
    if value.lower().startswith("file://"):
        value = urllib.request.url2pathname(urllib.parse.urlparse(value).path)
    return _existing(Path(value), kind)


def refuse_remote(value: Any, kind: str = "file") -> None:
    """Raises [`MediaError`] for an http(s) URL, or a list with one in it at any depth."""
    if isinstance(value, (list, tuple)):
        for one in value:
            refuse_remote(one, kind)
    elif isinstance(value, str) and value.lower().startswith(_HTTP):
        raise MediaError(
            f"{_short(value)} is a remote {kind}, and nothing is fetched unless you allow it: set "
            "`processor.allow_remote_media = True`, or download the file and pass its path"
        )


def _existing(path: Path, kind: str) -> Path:
    try:
        found = path.is_file()
    except (OSError, ValueError):
        found = False
    if not found:
        raise MediaError(f"the {kind} file {_short(str(path))} does not exist")
    return path


def _read_data_url(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError(f"the data URL {_short(url)} has no comma before its data")
    if not header.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(payload)
    payload = urllib.parse.unquote("".join(payload.split()))
    payload = payload.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the data URL {_short(url)} is not valid base64: {error}") from error


class _HttpRedirectsOnly(urllib.request.HTTPRedirectHandler):
    """An http server must not lead us to another scheme."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl.lower().startswith(_HTTP):
            raise MediaError(f"{_short(req.full_url)} redirects to {_short(newurl)}, which is not http(s)")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url: str) -> bytes:
    try:
        opener = urllib.request.build_opener(_HttpRedirectsOnly)
        with opener.open(url, timeout=REMOTE_TIMEOUT_SECONDS) as response:
            data = response.read(REMOTE_MAX_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise MediaError(f"{_short(url)} could not be fetched: {error}") from error
    if len(data) > REMOTE_MAX_BYTES:
        raise MediaError(f"{_short(url)} is larger than {REMOTE_MAX_BYTES} bytes: download it and pass its path")
    return data


def load_image(value: Any, allow_remote: bool = False, background: tuple[int, int, int] = BACKGROUND) -> np.ndarray:
    """
    Decodes one picture to what a viewer shows.

    EXIF orientation is applied whatever the container. Transparency lies on `background`. Of an animated picture (GIF,
    WebP, APNG) the first frame is taken; pass it as a video to get all frames.

    Args:
        value:
            PIL image, array or tensor (`[H, W]`, `[H, W, C]` or `[C, H, W]` with 1 to 4 channels; where both fit,
            channels come last), or anything [`read_source`] reads.
        allow_remote (`bool`, *optional*, defaults to `False`):
            Whether an http(s) URL may be fetched.
        background (`tuple[int, int, int]`, *optional*, defaults to white):
            Colour behind transparent pixels.

    Returns:
        `np.ndarray`: uint8 `[H, W, 3]`, RGB.

    Raises:
        MediaError: the picture is missing, broken, empty, has NaN pixels or values of no known range.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return array_to_rgb(value, background)
    if isinstance(value, Image.Image):
        return pil_to_rgb(value, background)
    source = read_source(value, "image", allow_remote)
    if source is None:
        raise MediaError(
            f"a {type(value).__name__} is no image: pass a PIL image, a path, bytes, an array or a data URL"
        )
    name = f"{len(source)} bytes" if isinstance(source, bytes) else _short(str(source))
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return pil_to_rgb(image, background)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"the image ({name}) cannot be read: {type(error).__name__}: {error}") from error


def pil_to_rgb(image: Image.Image, background: tuple[int, int, int] = BACKGROUND) -> np.ndarray:
    """
    Converts a PIL image of any mode to what it looks like.

    Args:
        image (`PIL.Image.Image`):
            The image, in any mode; 16-bit grey is scaled by 1/257, float grey in [0, 1] by 255.
        background (`tuple[int, int, int]`, *optional*, defaults to white):
            Colour behind transparent pixels.

    Returns:
        `np.ndarray`: uint8 `[H, W, 3]`.

    Raises:
        MediaError: the image is empty, cut off, or of a mode without a defined look.
    """
    refuse_drawn_by_programs(image)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:
        raise MediaError(f"the image {image!r} cannot be read: {type(error).__name__}: {error}") from error
    if 0 in image.size:
        raise MediaError(f"the image is empty: its size is {image.size[0]}x{image.size[1]} px")
    if image.mode.startswith(("I", "F")):
        return array_to_rgb(_wide_grey(image), background)
    if image.mode in ("LA", "La", "PA", "RGBa", "RGBA") or "transparency" in image.info:
        rgba = image if image.mode == "RGBA" else _to_rgba(image)
        return _flatten_alpha(np.asarray(rgba), background)
    if image.mode == "LAB":
        return np.asarray(_lab_to_rgb(image))
    try:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except ValueError as error:
        raise MediaError(f"images of mode {image.mode} cannot be shown as RGB: {error}") from error


def refuse_drawn_by_programs(image: Image.Image) -> None:
    """Raises [`MediaError`] for an opened image that Pillow would have another program draw. Call it before `load`."""
    if image.format in _REFUSED_FORMATS:
        raise MediaError(
            f"{image.format} images are not read, since drawing them runs other programs: convert it to PNG"
        )


def _to_rgba(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    return image.convert("RGBA")


def _wide_grey(image: Image.Image) -> np.ndarray:
    """Grey values of a 16-bit, 32-bit or float PIL image, typed so that their range is known."""
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)
    values = np.asarray(image)
    if image.mode == "I" and values.size and values.min() >= 0 and 255 < values.max() <= 65535:
        return values.astype(np.uint16)
    return values


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    return ImageCms.profileToProfile(
        image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )


def _flatten_alpha(rgba: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """Lays uint8 `[..., H, W, 4]` on the background; exact for alpha 0 and 255."""
    alpha = rgba[..., 3:].astype(np.uint32)
    blended = rgba[..., :3].astype(np.uint32) * alpha + np.asarray(background, np.uint32) * (255 - alpha)
    return ((blended + 127) // 255).astype(np.uint8)


def array_to_rgb(
    values: np.ndarray | torch.Tensor, background: tuple[int, int, int] = BACKGROUND, frames: bool = False
) -> np.ndarray:
    """
    Converts an array of pixels to uint8 RGB.

    Args:
        values (`np.ndarray` or `torch.Tensor`):
            `[H, W]`, `[H, W, C]` or `[C, H, W]` with C from 1 to 4 (grey, grey and alpha, RGB, RGBA). With `frames`,
            one more leading dimension. bool is black and white; uint16 spans 0 to 65535; other integers 0 to 255;
            floats 0 to 1, or 0 to 255 when one of them is 2 or more. Half a level beyond 0 to 1 is rounding.
        background (`tuple[int, int, int]`, *optional*, defaults to white):
            Colour behind transparent pixels.
        frames (`bool`, *optional*, defaults to `False`):
            Whether the first dimension counts frames.

    Returns:
        `np.ndarray`: uint8 `[H, W, 3]`, or `[T, H, W, 3]` with `frames`.

    Raises:
        MediaError: wrong shape, empty, NaN or infinite pixels, or values out of range.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    what, shape = ("video" if frames else "image"), values.shape
    if values.ndim == 2 + frames:
        values = values[..., None]
    if values.ndim != 3 + frames or 0 in values.shape:
        raise MediaError(
            f"an array of shape {shape} is no {what}: use {'[T, H, W, 3]' if frames else '[H, W, 3]'}, not empty"
        )
    if values.shape[-1] > 4 and values.shape[-3] <= 4:
        values = np.moveaxis(values, -3, -1)
    if values.shape[-1] > 4:
        raise MediaError(f"an array of shape {shape} is no {what}: no dimension holds 1 to 4 colour channels")
    values = _to_uint8(values, what)
    channels = values.shape[-1]
    if channels in (2, 4):
        rgba = values if channels == 4 else values[..., [0, 0, 0, 1]]
        return _flatten_alpha(rgba, background)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:-1], 3)))


def _to_uint8(values: np.ndarray, what: str) -> np.ndarray:
    if values.dtype == np.uint8:
        return values
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype == np.uint16:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
        raise MediaError(f"an array of {values.dtype} is no {what}: use uint8, or floats from 0 to 1")
    if not np.isfinite(values).all():
        raise MediaError(f"the {what} has NaN or infinite pixels: repair or drop it")
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.floating):
        if low >= -_HALF_LEVEL and high <= 1 + _HALF_LEVEL:
            return np.rint(values.clip(0, 1) * 255.0).astype(np.uint8)
        if low >= 0 and 1 < high < 2:
            raise MediaError(
                f"the {what} has floats up to {high}: either 0 to 1 with some beyond (clip them), or 0 to 255 and all "
                "but black (convert it to uint8)"
            )
    if low < 0 or high > 255:
        raise MediaError(
            f"the {what} has {values.dtype} values from {low} to {high}: they must lie in 0 to 255, or 0 to 1 as "
            "floats; undo the normalisation, or convert it to uint8"
        )
    return (np.rint(values) if np.issubdtype(values.dtype, np.floating) else values).astype(np.uint8)


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")

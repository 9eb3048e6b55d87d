"""Videos of every kind a user may hand over, decoded to the frames the model looks at."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence

from .media_moemb import (
    BACKGROUND,
    MediaError,
    array_to_rgb,
    kind_of_bytes,
    load_image,
    pil_to_rgb,
    read_source,
    refuse_drawn_by_programs,
)


try:
    import av
except ImportError:
    av = None


# Containers that hold their frames themselves. FFmpeg also reads playlists and session descriptions (HLS, concat,
# SDP), which would have it open other files and network connections for whoever wrote them.
_CONTAINERS = "mov,matroska,avi,flv,asf,mpeg,mpegts,mpegvideo,ogg,nut,mxf,ivf,obu,h264,hevc,m4v,mjpeg,wav,mp3,flac,aac"
OPEN_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}


@dataclass(frozen=True)
class FrameSampling:
    """
    Which frames of a video are looked at.

    Args:
        num_frames (`int`, *optional*):
            This many frames, evenly spaced from first to last; all of them when there are fewer. Stands instead of
            `fps`.
        fps (`float`, *optional*):
            Frames per second of a video whose own rate is known, at least `min_frames`, at most `max_frames`, evenly
            spaced.
        min_frames (`int`, *optional*, defaults to 4):
            Least number of frames that `fps` leaves.
        max_frames (`int`, *optional*, defaults to 768):
            Most frames in any case.
        bare_fps (`float`, *optional*, defaults to 24.0):
            Rate that bare frames (an array or a list) are taken to have in their timestamps. Bare frames count as
            sampled already: `fps` leaves them all in, up to `max_frames`.
    """

    num_frames: int | None = None
    fps: float | None = 2.0
    min_frames: int = 4
    max_frames: int = 768
    bare_fps: float = 24.0

    def indices(self, total: int, rate: float | None) -> np.ndarray:
        """
        Args:
            total (`int`): frames there are.
            rate (`float`, *optional*): frames per second, `None` for bare frames.

        Returns:
            `np.ndarray`: int64 indices of the frames to take, ascending.
        """
        if self.num_frames is not None:
            count = self.num_frames
        elif rate is not None and self.fps is not None:
            count = max(int(total / rate * self.fps), self.min_frames)
        else:
            count = total
        count = max(1, min(count, self.max_frames, total))
        return np.linspace(0, total - 1, count).round().astype(np.int64)


@dataclass(frozen=True)
class VideoClip:
    """
    The frames the model looks at.

    Args:
        frames (`np.ndarray`): uint8 `[T, H, W, 3]`, at least one frame.
        times (`np.ndarray`): float64 `[T]`, seconds from the start of the video.
    """

    frames: np.ndarray
    times: np.ndarray


def load_video(
    value: Any,
    sampling: FrameSampling,
    allow_remote: bool = False,
    background: tuple[int, int, int] = BACKGROUND,
) -> VideoClip:
    """
    Decodes one video and samples its frames.

    Args:
        value:
            Frames as an array or tensor (`[T, H, W, C]`, `[T, C, H, W]`, or grey `[T, H, W]`); a list of pictures of
            one size; a mapping with `frames` (or `array`) and optionally `fps` (or `video_metadata`, a mapping with
            `fps`); an animated GIF, WebP or APNG; a video file as a path, bytes, file object, data URL or, when
            allowed, http(s) URL; or a decoder of torchcodec.
        sampling (`FrameSampling`):
            Which frames to take.
        allow_remote (`bool`, *optional*, defaults to `False`):
            Whether an http(s) URL may be fetched.
        background (`tuple[int, int, int]`, *optional*, defaults to white):
            Colour behind transparent pixels.

    Returns:
        [`VideoClip`]

    Raises:
        MediaError: the video is missing, broken or empty, has NaN pixels or frames of several sizes, or PyAV is needed
            and not installed.
    """
    rate = None
    if isinstance(value, dict) and ("frames" in value or "array" in value):
        value, rate = _unwrap(value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if value.ndim == 5 and value.shape[0] == 1:
            value = value[0]
        if value.ndim not in (3, 4) or value.shape[0] == 0:
            raise MediaError(
                f"an array of shape {tuple(value.shape)} is no video: it must be [T, H, W, 3] with T >= 1"
            )
        if value.ndim == 3 and value.shape[-1] <= 4:
            raise MediaError(
                f"an array of shape {tuple(value.shape)} is a picture: a video of one frame is array[None]"
            )
        chosen = sampling.indices(len(value), rate)
        frames = array_to_rgb(value[chosen], background, frames=True)
        return VideoClip(frames, chosen / (rate or sampling.bare_fps))
    if isinstance(value, (list, tuple)):
        if not value:
            raise MediaError("the video is an empty list: it must have at least one frame")
        chosen = sampling.indices(len(value), rate)
        frames = [_frame(value, int(index), allow_remote, background) for index in chosen]
        return VideoClip(_stack(frames), chosen / (rate or sampling.bare_fps))
    if isinstance(value, Image.Image):
        return _animation(value, sampling, background)
    if hasattr(value, "get_frames_at") and hasattr(value, "metadata"):
        return _torchcodec(value, sampling)
    source = read_source(value, "video", allow_remote)
    if source is None:
        raise MediaError(
            f"a {type(value).__name__} is no video: pass a list of frames, an array [T, H, W, 3], a path or bytes"
        )
    if kind_of_bytes(source if isinstance(source, bytes) else _head(source)) == "image":
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return _animation(image, sampling, background)
    return _file(source, sampling)


def _unwrap(value: dict) -> tuple[Any, float | None]:
    unknown = set(value) - {"frames", "array", "fps", "video_metadata"}
    if unknown:
        raise MediaError(f"a video mapping has unknown keys {sorted(unknown)}: use 'frames' (or 'array') and 'fps'")
    metadata = value.get("video_metadata") or {}
    rate = value.get("fps", metadata.get("fps") if isinstance(metadata, dict) else getattr(metadata, "fps", None))
    if rate is not None and not (isinstance(rate, (int, float, np.number)) and np.isfinite(rate) and rate > 0):
        raise MediaError(f"the video's fps must be a positive number, got {rate!r}")
    return value["frames"] if "frames" in value else value["array"], rate


def _frame(frames: list | tuple, index: int, allow_remote: bool, background) -> np.ndarray:
    try:
        return load_image(frames[index], allow_remote, background)
    except MediaError as error:
        raise MediaError(f"frame {index}: {error}") from error


def _stack(frames: list[np.ndarray]) -> np.ndarray:
    sizes = sorted({(frame.shape[1], frame.shape[0]) for frame in frames})
    if len(sizes) > 1:
        raise MediaError(f"the frames of a video must have one size, these have {sizes} (width, height): resize them")
    return np.stack(frames)


def _animation(image: Image.Image, sampling: FrameSampling, background) -> VideoClip:
    """Frames of an animated picture, each shown for as long as the file says; a still picture is a one-frame video."""
    refuse_drawn_by_programs(image)
    try:
        # An APNG may carry a still image for viewers that cannot animate; it is no frame of the animation.
        first = 1 if getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1 else 0
        total = getattr(image, "n_frames", 1) - first
        durations = []
        for number, frame in enumerate(ImageSequence.Iterator(image)):
            if number >= first:
                frame.load()  # WebP tells a frame's duration only then
                durations.append(max(float(frame.info.get("duration") or 0), 0.0) / 1000)
        starts = np.concatenate([[0.0], np.cumsum(durations)])
        rate = total / starts[-1] if starts[-1] > 0 else None
        chosen = sampling.indices(total, rate)
        frames = []
        for index in chosen:
            image.seek(int(index) + first)
            frames.append(pil_to_rgb(image.copy(), background))
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"the animated image cannot be read: {type(error).__name__}: {error}") from error
    times = starts[chosen] if rate else chosen / sampling.bare_fps
    return VideoClip(_stack(frames), times)


def _torchcodec(decoder: Any, sampling: FrameSampling) -> VideoClip:
    metadata = decoder.metadata
    total, rate = int(metadata.num_frames or 0), metadata.average_fps
    if total < 1:
        raise MediaError("the video has no frames")
    chosen = sampling.indices(total, rate)
    batch = decoder.get_frames_at(indices=[int(index) for index in chosen])
    return VideoClip(array_to_rgb(batch.data, frames=True), chosen / (rate or sampling.bare_fps))


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 16)


def _file(source: bytes | Path, sampling: FrameSampling) -> VideoClip:
    name = f"{len(source)} bytes" if isinstance(source, bytes) else repr(str(source))
    if av is None:
        raise MediaError(f"reading the video file ({name}) needs PyAV: run `pip install av`, or pass its frames")
    try:
        frames, times = _decode(io.BytesIO(source) if isinstance(source, bytes) else str(source), sampling)
    except MediaError as error:
        raise MediaError(f"the video ({name}): {error}") from error
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        raise MediaError(f"the video ({name}) cannot be read, and it is no image either: {detail}") from error
    return VideoClip(frames, times)


def _decode(file: Any, sampling: FrameSampling) -> tuple[np.ndarray, np.ndarray]:
    """Two passes: count frames and their times without converting pixels, then convert only the frames to keep."""
    with av.open(file, options=OPEN_OPTIONS) as container:
        if not container.streams.video:
            raise MediaError("it has no video stream")
        times = _frame_times(container)
    if not times:
        raise MediaError("it has no frames")
    steps = np.diff(times)
    rate = len(steps) / float(times[-1] - times[0]) if len(steps) and times[-1] > times[0] else None
    chosen = sampling.indices(len(times), rate if rate else (sampling.bare_fps if len(times) > 1 else None))
    wanted, frames = set(chosen.tolist()), []
    if hasattr(file, "seek"):
        file.seek(0)
    with av.open(file, options=OPEN_OPTIONS) as container:
        for number, frame in enumerate(_decoded(container)):
            if number in wanted:
                frames.append(upright(frame))
    if len(frames) != len(wanted):
        raise MediaError(f"it broke off after {len(frames)} of {len(wanted)} frames")
    return _stack(frames), np.asarray(times)[chosen] - times[0]


def _decoded(container):
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return container.decode(stream)


def _frame_times(container) -> list[float]:
    stream = container.streams.video[0]
    step = 1.0 / float(stream.average_rate) if stream.average_rate else 1.0 / 24
    times: list[float] = []
    for frame in _decoded(container):
        times.append(frame.time if frame.time is not None else (times[-1] + step if times else 0.0))
    return times


def upright(frame) -> np.ndarray:
    """RGB pixels, turned as the file's display matrix says (phones store upright videos lying down)."""
    pixels = frame.to_ndarray(format="rgb24")
    turns = round((getattr(frame, "rotation", 0) or 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels

"""Long videos as consecutive stretches, decoded in one pass that holds the frames of one stretch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modeling_moemb.media_moemb import MediaError
from modeling_moemb.video_moemb import OPEN_OPTIONS, FrameSampling, upright


# A stretch this much longer than wished is better than one that lasts a second.
_TOLERANCE = 1.25


@dataclass(frozen=True)
class Stretch:
    """
    Consecutive frames of a video.

    Args:
        frames (`np.ndarray`): uint8 `[T, H, W, 3]`, those the model looks at.
        rate (`float`): of these frames, per second.
        start (`float`): seconds from the beginning of the video.
        end (`float`): the same, of its end.
    """

    frames: np.ndarray
    rate: float
    start: float
    end: float


def clip_stretches(path: Path, seconds: float, sampling: FrameSampling) -> Iterator[Stretch] | None:
    """
    Cuts a long video.

    Args:
        path (`Path`): the video file.
        seconds (`float`): length of a stretch; all of a video are equally long.
        sampling (`FrameSampling`): which frames of a stretch to keep.

    Returns:
        `Iterator[Stretch]` or `None`: `None` for a video that is short enough, or whose length or rate the file does
        not tell: it is embedded whole.

    Raises:
        MediaError: the file is no video.
    """
    import av

    try:
        with av.open(str(path), options=OPEN_OPTIONS) as container:
            if not container.streams.video:
                raise MediaError("it has no video stream")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 0)
            if stream.duration and stream.time_base:
                duration = float(stream.duration * stream.time_base)
            else:
                duration = (container.duration or 0) / 1e6
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"it is no video that can be read: {type(error).__name__}: {error}") from error
    if rate <= 0 or duration <= seconds * _TOLERANCE:
        return None
    count = max(2, round(duration / seconds))
    return _decode(path, duration / count, count, rate, sampling)


def _decode(path: Path, seconds: float, count: int, rate: float, sampling: FrameSampling) -> Iterator[Stretch]:
    import av

    wished = sampling.indices(max(1, round(seconds * rate)), rate) / rate
    frames: list[np.ndarray] = []
    number, first, time = 0, None, 0.0
    with av.open(str(path), options=OPEN_OPTIONS) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for index, frame in enumerate(container.decode(stream)):
            time = float(frame.time) if frame.time is not None else index / rate
            first = time if first is None else first
            time -= first
            if time >= (number + 1) * seconds - 0.5 / rate and number < count - 1:
                if frames:
                    yield _stretch(frames, number, seconds)
                number, frames = number + 1, []
            due = len(frames) < len(wished) and time - number * seconds >= wished[len(frames)] - 0.5 / rate
            if due:
                frames.append(upright(frame))
    if first is None:
        raise MediaError("it has no frames")
    if frames:
        yield _stretch(frames, number, seconds, time + 1 / rate)


def _stretch(frames: list[np.ndarray], number: int, seconds: float, end: float | None = None) -> Stretch:
    start = number * seconds
    end = start + seconds if end is None else end
    return Stretch(np.stack(frames), max(len(frames) / max(end - start, 1e-3), 1e-3), start, end)


def clock(seconds: float) -> str:
    """Returns a time as `0:07` or `1:02:30`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text

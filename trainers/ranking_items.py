"""From a benchmark's item to what the model's processor takes, by the conventions the model records."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modeling_moemb.video_moemb import FrameSampling, load_video

from .evaluation_conventions import EvaluationConventions
from .ranking_task import FrameFolder, TablePicture, TaskItem, media_identity


_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def spaced_frames(count: int, wanted: int) -> np.ndarray:
    """
    The frames that are looked at: evenly spaced from the first to the last, rounded down as the official code does.

    Args:
        count (`int`): frames there are.
        wanted (`int`): frames to take; all of them when there are fewer.

    Returns:
        `np.ndarray`: int64 indices, ascending.
    """
    if wanted >= count:
        return np.arange(count)
    return np.linspace(0, count - 1, wanted).astype(np.int64)


@dataclass(frozen=True)
class SavedFrames(FrameSampling):
    """
    Frames of a video file as if they had been saved first and sampled then.

    Args:
        saved (`int`, *optional*, defaults to 64): frames that are saved at most, frame floor(i * total / saved).
        wanted (`int`, *optional*, defaults to 64): frames taken of those.
    """

    saved: int = 64
    wanted: int = 64

    def indices(self, total: int, rate: float | None) -> np.ndarray:
        kept = np.arange(total)
        if total > self.saved:
            kept = (np.arange(self.saved) * (total / self.saved)).astype(np.int64)
        return kept[spaced_frames(len(kept), self.wanted)]


class ItemPresenter:
    """
    Presents items to a model.

    Args:
        conventions (`EvaluationConventions`): how.
        prompts (`Mapping[str, str]`): the prompts the model records, by name.
        default_prompt_name (`str`, *optional*): which of them holds when none is named for a side.
    """

    def __init__(
        self, conventions: EvaluationConventions, prompts: Mapping[str, str], default_prompt_name: str | None = None
    ):
        self.conventions = conventions
        self._recorded = {}
        for side, names in _PROMPT_NAMES.items():
            found = next((prompts[name] for name in names if name in prompts), None)
            self._recorded[side] = found if found is not None else prompts.get(default_prompt_name or "", "")

    def instruction(self, item: TaskItem, side: str) -> str:
        """Returns the task's instruction for an item of a side, `""` when the conventions give it none."""
        wanted = side == "query" or self.conventions.candidate_instruction == "task"
        return item.instruction.strip() if wanted else ""

    def prompt(self, item: TaskItem, side: str) -> str:
        """
        The system turn of an item.

        Args:
            item (`TaskItem`): the item.
            side (`str`): `"query"` or `"document"`.

        Returns:
            `str`: the prompt to encode it with, `""` for no system turn.
        """
        own = self.instruction(item, side)
        if own and self.conventions.instruction_placement == "system":
            return own
        if side == "document" and self.conventions.candidate_instruction == "none":
            return ""
        return self._recorded[side] or ""

    def texts(self, item: TaskItem, side: str) -> list[tuple[str, Any]]:
        """Returns the parts of an item with its texts as the model reads them, media as they are."""
        parts = [(kind, self._text(value) if kind == "text" else value) for kind, value in item.parts]
        parts = [(kind, value) for kind, value in parts if kind != "text" or value != ""]
        own = self.instruction(item, side)
        if not own or self.conventions.instruction_placement == "system":
            return parts or [("text", "")]
        first = next((number for number, (kind, _) in enumerate(parts) if kind == "text"), None)
        if first is None:
            return [*parts, ("text", own)]
        parts[first] = ("text", f"{own} {parts[first][1]}")
        return parts

    def _text(self, text: str) -> str:
        return " ".join(text.split()) if self.conventions.whitespace == "collapse" else text

    def key(self, item: TaskItem, side: str) -> str:
        """Returns the address of an item's vector in the cache: 32 hexadecimal digits over prompt and content."""
        digest = hashlib.blake2b(self.prompt(item, side).encode(), digest_size=16)
        for kind, value in self.texts(item, side):
            content = media_identity(value)
            digest.update(f"\0{kind} {len(content)}\0".encode() + content)
        return digest.hexdigest()

    def content(self, item: TaskItem, side: str) -> list[dict[str, Any]]:
        """
        What the processor takes: typed parts in order. Frames of a video file are decoded here, all else later.

        Args:
            item (`TaskItem`): the item.
            side (`str`): `"query"` or `"document"`.

        Returns:
            `list[dict]`: parts such as `{"type": "image", "image": "/path"}`.
        """
        content: list[dict[str, Any]] = []
        for kind, value in self.texts(item, side):
            if kind == "text":
                content.append({"type": "text", "text": value})
            elif kind == "image":
                picture = value.read() if isinstance(value, TablePicture) else str(value)
                content.append({"type": "image", "image": picture})
            else:
                content += self._video(value)
        return content

    def _video(self, value: FrameFolder) -> list[dict[str, Any]]:
        frames = self.frames(value)
        if self.conventions.video_input == "images":
            return [{"type": "image", "image": frame} for frame in frames]
        video: dict[str, Any] = {"frames": frames}
        if self.conventions.frames_fps is not None:
            video["fps"] = self.conventions.frames_fps
        return [{"type": "video", "video": video}]

    def frames(self, value: FrameFolder) -> list[Any]:
        """Returns the frames of a video that the model looks at: paths, or arrays uint8 `[H, W, 3]`."""
        wanted = self.conventions.num_frames
        saved: list[Path] = value.paths()
        if saved:
            frames: list[Any] = [str(saved[index]) for index in spaced_frames(len(saved), wanted)]
        else:
            frames = list(load_video(value.video, SavedFrames(saved=value.saved, wanted=wanted)).frames)
        if self.conventions.pad_short_clips:
            frames += frames[-1:] * (wanted - len(frames))
        return frames


def item_size(item: TaskItem) -> tuple:
    """A sort key that puts items of like cost into one batch: same kinds, texts of like length."""
    kinds = tuple(kind for kind, _ in item.parts if kind != "text")
    return len(kinds), kinds, sum(len(value) for kind, value in item.parts if kind == "text")


def describe_task_item(item: TaskItem) -> str:
    """Returns an item as errors print it, such as `image a.png + text 'cat'`."""
    parts = []
    for kind, value in item.parts:
        if isinstance(value, str):
            parts.append(f"text {value[:60]!r}")
        elif isinstance(value, TablePicture):
            parts.append(f"{kind} of row {value.row}")
        else:
            parts.append(f"{kind} {value.folder if isinstance(value, FrameFolder) else value}")
    return " + ".join(parts) or "an empty item"

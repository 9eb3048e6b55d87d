"""How a model wants the items of a benchmark presented: recorded with the model, used by every benchmark.

A correct checkpoint of Qwen3-VL-Embedding lost 7 to 9 points of MMEB-V2 in code that presented items in another way
than it was trained with (TIGER-AI-Lab/VLM2Vec pull request 213). Each of the six causes is a setting here:

1. `pooled_state`: the embedding is the state *after* the final norm; the state before it points elsewhere.
2. `instruction_placement`: a task's instruction is the system turn, or stands before the query's own text.
3. `candidate_instruction`: candidates get the model's own document prompt, the task's instruction for them, or none.
4. `video_input`, `num_frames`, `frames_fps`: a video is one video of that many frames, not so many pictures.
5. `dataset_variants`: which version of a data set is scored; the tasks of the leaderboard are the repaired ones.
6. `whitespace`, `pad_short_clips`: texts are read as they are, short clips with the frames they have.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import MoEMBError
from .files import write_atomically


POOLED_STATE = "after the final norm"
CONFIG_KEY = "evaluation"
_CHOICES = {
    "pooled_state": (POOLED_STATE,),
    "instruction_placement": ("system", "user"),
    "candidate_instruction": ("recorded", "task", "none"),
    "video_input": ("video", "images"),
    "dataset_variants": ("leaderboard", "original"),
    "whitespace": ("keep", "collapse"),
}


class ConventionError(MoEMBError, ValueError):
    """A convention that does not exist or that this code cannot follow. The message names it and the choices."""


@dataclass(frozen=True)
class EvaluationConventions:
    """
    The conventions, see the module.

    Args:
        pooled_state (`str`, *optional*):
            Always `"after the final norm"`: recorded so that other code can see it. A model that records anything else
            cannot be evaluated here.
        instruction_placement (`str`, *optional*, defaults to `"system"`):
            `"system"`, or `"user"`: the instruction and a space before the item's first text, the model's own prompt
            in the system turn.
        candidate_instruction (`str`, *optional*, defaults to `"recorded"`):
            `"recorded"` (the document prompt of the model), `"task"` or `"none"`.
        video_input (`str`, *optional*, defaults to `"video"`):
            `"video"`, or `"images"`: each frame a picture of its own.
        num_frames (`int`, *optional*, defaults to 64):
            Frames of a video, evenly spaced from its first to its last saved frame.
        frames_fps (`float`, *optional*):
            Rate that saved frames are taken to have, for timestamps; the model's `bare_frames_fps` when left out.
        dataset_variants (`str`, *optional*, defaults to `"leaderboard"`):
            `"leaderboard"`: the repaired page tasks and the MomentSeeker of 1,602 rows; `"original"`: those before
            them, which older papers report.
        whitespace (`str`, *optional*, defaults to `"keep"`):
            `"keep"`, or `"collapse"`: every run of white space is one space.
        pad_short_clips (`bool`, *optional*, defaults to `False`):
            Whether the last frame of a clip of fewer than `num_frames` is repeated up to that number.
    """

    pooled_state: str = POOLED_STATE
    instruction_placement: Literal["system", "user"] = "system"
    candidate_instruction: Literal["recorded", "task", "none"] = "recorded"
    video_input: Literal["video", "images"] = "video"
    num_frames: int = 64
    frames_fps: float | None = None
    dataset_variants: Literal["leaderboard", "original"] = "leaderboard"
    whitespace: Literal["keep", "collapse"] = "keep"
    pad_short_clips: bool = False

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConventionError(f"the convention {name} is {value!r}; known are {', '.join(map(repr, choices))}")
        if not isinstance(self.num_frames, int) or self.num_frames < 1:
            raise ConventionError(f"the convention num_frames is {self.num_frames!r}, but must be at least 1")
        if self.frames_fps is not None and not self.frames_fps > 0:
            raise ConventionError(f"the convention frames_fps is {self.frames_fps!r}, but must be positive")
        if not isinstance(self.pad_short_clips, bool):
            raise ConventionError(f"the convention pad_short_clips is {self.pad_short_clips!r}, not true or false")

    def to_dict(self) -> dict[str, Any]:
        """Returns the conventions as the configuration records them."""
        return dataclasses.asdict(self)


def default_conventions(processor: Any) -> EvaluationConventions:
    """
    The conventions of a model that records none: those of its processor.

    Args:
        processor (`MoEMBProcessor` or `Qwen3VLProcessor`): its video settings give frame count and rate.

    Returns:
        [`EvaluationConventions`]
    """
    video = getattr(processor, "video_processor", None)
    count = getattr(video, "num_frames", None) or getattr(video, "max_frames", None) or 64
    rate = None if getattr(video, "num_frames", None) else getattr(video, "fps", None)
    return EvaluationConventions(num_frames=int(count), frames_fps=rate)


def conventions_of(model: Any, overrides: dict[str, Any] | None = None) -> EvaluationConventions:
    """
    The conventions a loaded model is evaluated with.

    Args:
        model (`SentenceTransformer`): the model; `config.evaluation` is what it records.
        overrides (`dict`, *optional*): conventions of this run, which win.

    Returns:
        [`EvaluationConventions`]

    Raises:
        ConventionError: an unknown convention, or one that this code cannot follow.
    """
    transformer = next(iter(model)) if hasattr(model, "__iter__") else model
    config = getattr(getattr(transformer, "model", None), "config", None)
    base = default_conventions(getattr(transformer, "processor", None)).to_dict()
    recorded = getattr(config, CONFIG_KEY, None) or {}
    return _build(base | dict(recorded) | (overrides or {}))


def _build(values: dict[str, Any]) -> EvaluationConventions:
    known = [field.name for field in dataclasses.fields(EvaluationConventions)]
    if unknown := sorted(set(values) - set(known)):
        raise ConventionError(f"there is no convention {unknown[0]!r}; the conventions are {', '.join(known)}")
    return EvaluationConventions(**values)


def record_conventions(folder: Path, conventions: EvaluationConventions) -> None:
    """
    Writes conventions into the `config.json` of a model repository, atomically.

    Args:
        folder (`Path`): the repository.
        conventions (`EvaluationConventions`): what to record.

    Raises:
        ConventionError: the folder has no readable `config.json`.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConventionError(f"the conventions cannot be recorded in {path}: {error}") from error
    config[CONFIG_KEY] = conventions.to_dict()
    write_atomically(path, json.dumps(config, indent=2, sort_keys=True) + "\n")

"""The video tasks of MMEB-V2 that classify or retrieve videos, and its three moment retrieval tasks."""

import ast
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .mmeb_sources import MMEBSources, gather, text_item
from .mmeb_tasks import MMEBTask
from .ranking_tables import require_columns
from .ranking_task import BenchmarkDataError, FrameFolder, RankingRow, RankingTask, TaskItem


LABEL_VARIABLE = "VIDEOCLS_LABEL_MAPPING"
_TEXT_COLUMNS = {
    "DiDeMo": ("video", "caption"),
    "MSR-VTT": ("video_id", "caption"),
    "MSVD": ("video_id", "caption"),
    "VATEX": ("videoID", "enCap"),
    "YouCook2": ("id", "sentence"),
}
_VIDEO_COLUMNS = {"DiDeMo": "video", "MSR-VTT": "video", "MSVD": "video", "YouCook2": "video_path"}
_SEEKER_INSTRUCTIONS = {
    "text": "Find the clip that corresponds to the given text:",
    "image": "Select the video clip that aligns with the given text and image:",
    "video": "Find the clip that corresponds to the given sentence and video segment:",
}
_CLIP_FRAMES = 8


def read_video_label(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a classification task: a video is ranked against the names of all classes."""
    table, source = sources.table(task)
    require_columns(table, ("video_id", "pos_text"), task.name)
    labels = video_labels(task, sources.label_names)
    queries, answers = [], []
    for number, row in enumerate(sources.rows(task, table)):
        if row["pos_text"] not in labels:
            raise BenchmarkDataError(f"{task.name}: the class {row['pos_text']!r} of row {number} is no class name")
        frames = sources.frames(task, str(row["video_id"]), f"{row['video_id']}.mp4")
        queries.append(TaskItem((("video", frames),), task.query_instruction))
        answers.append(RankingRow({row["pos_text"]: 1.0}))
    return gather(task, source, queries, answers, [(label, text_item(label)) for label in labels])


def video_labels(task: MMEBTask, path: Path | None) -> list[str]:
    """
    Reads the class names of a classification task. They are not in its table, whose rows leave classes out.

    Args:
        task (`MMEBTask`): the task.
        path (`Path`, *optional*): a JSON file `{"UCF101": [names], ...}`, or the file
            `src/data/eval_dataset/video_classification_utils.py` of a VLM2Vec checkout, which is read, not run.

    Returns:
        `list[str]`: the names.

    Raises:
        BenchmarkDataError: no file was named, or it lacks the task.
    """
    name = task.repository.partition("/")[2]
    if path is None:
        raise BenchmarkDataError(
            f"{task.name} ranks all class names, and its table does not list them: set label_names to the file "
            "src/data/eval_dataset/video_classification_utils.py of a checkout of github.com/TIGER-AI-Lab/VLM2Vec, "
            f'or to a JSON file {{"{name}": [names]}}'
        )
    try:
        text = path.read_text(encoding="utf-8")
        mapping = json.loads(text) if path.suffix == ".json" else _python_labels(text)
        labels = mapping[name] if name in mapping else mapping[task.name]
    except (OSError, ValueError, SyntaxError, KeyError, TypeError) as error:
        raise BenchmarkDataError(f"{task.name}: {path} gives no class names of '{name}' ({error!r})") from error
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise BenchmarkDataError(f"{task.name}: the class names of '{name}' in {path} are no list of texts")
    return list(dict.fromkeys(labels))


def _python_labels(source: str) -> dict[str, list[str]]:
    """The mapping from data sets to label lists that a Python file assigns, without running it."""
    values: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if node.targets[0].id == LABEL_VARIABLE and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {
                ast.literal_eval(key): values[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
                for key, value in pairs
            }
        try:
            values[node.targets[0].id] = ast.literal_eval(node.value)
        except ValueError:
            continue
    raise ValueError(f"there is no {LABEL_VARIABLE}")


def read_video_choice(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads SmthSmthV2: a video is ranked against the answers of its row (`neg_text`, the right one among them)."""
    table, source = sources.table(task)
    require_columns(table, ("video_id", "pos_text", "neg_text"), task.name)
    queries, answers, candidates = [], [], []
    for row in sources.rows(task, table):
        frames = sources.frames(task, str(row["video_id"]), f"{row['video_id']}.mp4")
        queries.append(TaskItem((("video", frames),), task.query_instruction))
        answers.append(RankingRow({row["pos_text"]: 1.0}, tuple(row["neg_text"])))
        candidates += [(name, text_item(name)) for name in row["neg_text"]]
    return gather(task, source, queries, answers, candidates)


def read_text_video(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a retrieval task: a caption is ranked against all videos. Of several captions the first one asks."""
    table, source = sources.table(task)
    identity, caption = _TEXT_COLUMNS[task.name]
    file_column = _VIDEO_COLUMNS.get(task.name)
    require_columns(table, [identity, caption, *([file_column] if file_column else [])], task.name)
    queries, answers, candidates = [], [], []
    for row in sources.rows(task, table):
        name = Path(str(row[identity])).stem if task.name == "DiDeMo" else str(row[identity])
        text = row[caption] if isinstance(row[caption], str) else row[caption][0]
        queries.append(text_item(text, task.query_instruction))
        answers.append(RankingRow({name: 1.0}))
        candidates.append((name, _clip(sources.frames(task, name, _video_file(row, file_column, name)), task)))
    return gather(task, source, queries, answers, candidates)


def _video_file(row: Mapping[str, Any], column: str | None, name: str) -> str:
    return os.path.basename(str(row[column])) if column else f"{name}.mp4"


def _clip(frames: FrameFolder, task: MMEBTask) -> TaskItem:
    return TaskItem((("video", frames),), task.candidate_instruction)


def read_moment(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """
    Reads QVHighlight or Charades-STA: a video and a sentence are ranked against the clips in that video's folder.

    The folder of a video holds the frames of the whole in `query`, of the right clip in `positive...`, and those of
    wrong clips in folders of any other name.
    """
    table, source = sources.table(task)
    require_columns(table, ("query", "video_path"), task.name)
    queries, answers, candidates = [], [], []
    for number, row in enumerate(sources.rows(task, table)):
        video = Path(row["video_path"]).stem
        folder = sources.folder / task.media / video
        clips = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        clips = [clip for clip in clips if clip != "query"]
        right = [clip for clip in clips if clip.startswith("positive")]
        if not right or len(clips) < 2:
            raise BenchmarkDataError(
                f"{task.name}: the folder {folder} of row {number} holds no clip 'positive...' beside others"
            )
        whole = sources.frames(task, f"{video}/query")
        queries.append(TaskItem((("video", whole), ("text", row["query"])), task.query_instruction))
        names = [f"{video}/{clip}" for clip in clips]
        answers.append(RankingRow({f"{video}/{clip}": 1.0 for clip in right}, tuple(names)))
        candidates += [(name, _clip(sources.frames(task, name, saved=_CLIP_FRAMES), task)) for name in names]
    return gather(task, source, queries, answers, candidates)


def read_moment_seeker(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads MomentSeeker: a text, alone or with a picture or a clip, is ranked against the clips of its row."""
    table, source = sources.table(task)
    require_columns(table, ("query", "positive_frames", "negative_frames", "input_frames"), task.name)
    queries, answers, candidates = [], [], []
    for row in sources.rows(task, table):
        queries.append(_seeker_query(task, sources, row))
        right = [_clip_name(entry) for entry in _entries(row["positive_frames"])]
        names = [*right, *(_clip_name(entry) for entry in _entries(row["negative_frames"]))]
        answers.append(RankingRow(dict.fromkeys(right, 1.0), tuple(names)))
        candidates += [(name, _clip(sources.frames(task, f"video_frames/{name}"), task)) for name in names]
    return gather(task, source, queries, answers, candidates)


def _entries(value: Any) -> list[Mapping[str, Any]]:
    """A list of records; some versions of `datasets` turn it into a record of lists."""
    if isinstance(value, Mapping):
        return [{"output_path": path} for path in value["output_path"]]
    return list(value)


def _clip_name(entry: Mapping[str, Any]) -> str:
    return entry["output_path"].replace("/", "_").split(".mp4")[0]


def _seeker_query(task: MMEBTask, sources: MMEBSources, row: Mapping[str, Any]) -> TaskItem:
    given, text = row["input_frames"] or "", ("text", row["query"])
    if given.endswith(".mp4"):
        name = given.split(".mp4")[0].replace("/", "_")
        return TaskItem((("video", sources.frames(task, f"video_frames/{name}")), text), _SEEKER_INSTRUCTIONS["video"])
    if given.endswith(".jpg"):
        picture = sources.folder / task.media / f"query_{given}"
        return TaskItem((("image", picture), text), _SEEKER_INSTRUCTIONS["image"])
    return TaskItem((text,), _SEEKER_INSTRUCTIONS["text"])

"""The video question answering tasks of MMEB-V2: a video and a question are ranked against the row's answers.

The question names its options, each task in its own way; what is embedded as a candidate is the answer's text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .mmeb_sources import MMEBSources, gather, text_item
from .mmeb_tasks import MMEBTask
from .ranking_tables import require_columns
from .ranking_task import BenchmarkDataError, RankingRow, RankingTask, TaskItem


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MVBENCH_SUBSETS = (
    "episodic_reasoning", "action_sequence", "action_prediction", "action_antonym", "fine_grained_action",
    "unexpected_action", "object_existence", "object_interaction", "object_shuffle", "moving_direction",
    "action_localization", "scene_transition", "action_count", "moving_count", "moving_attribute", "state_change",
    "fine_grained_pose", "character_order", "egocentric_navigation", "counterfactual_inference",
)  # fmt: skip


class _Asked:
    """A question as it is embedded.

    Args:
        text (`str`): the question with its options.
        names (`Sequence[str]`): names of the candidates.
        answers (`Sequence[str]`): their texts.
        right (`int`): which of them is right.
        frames (`str`): folder of the video's frames.
        video (`str`): the video's file.
    """

    def __init__(self, text: str, names: Sequence[str], answers: Sequence[str], right: int, frames: str, video: str):
        self.text, self.names, self.answers, self.right = text, names, answers, right
        self.frames, self.video = frames, video


def _with_options(question: str, options: Sequence[str]) -> str:
    lettered = [f"({letter}) {option}" for letter, option in zip(_LETTERS, options)]
    return "\n".join([question, "Options:", *lettered])


def _bare(option: str) -> str:
    """`A. a red car.` as `a red car`."""
    return option[option.find(". ") :].strip(". ")


def _video_mme(row: Mapping[str, Any]) -> _Asked:
    options = row["options"]
    text = "\n".join([row["question"], *options])
    right = _LETTERS.index(row["answer"])
    return _Asked(text, options, [_bare(option) for option in options], right, row["videoID"], f"{row['videoID']}.mp4")


def _next_qa(row: Mapping[str, Any]) -> _Asked:
    options = [row[f"a{number}"] for number in range(5)]
    text = _with_options(row["question"], options)
    return _Asked(text, options, options, int(row["answer"]), str(row["video"]), f"{row['video']}.mp4")


def _ego_schema(row: Mapping[str, Any]) -> _Asked:
    options = row["option"]
    text = row["question"] + " ".join(options)
    video = row["video_idx"]
    return _Asked(text, options, [_bare(option) for option in options], int(row["answer"]), video, f"{video}.mp4")


def _activity_net(row: Mapping[str, Any]) -> _Asked:
    options = ["yes", "no"]
    video = f"v_{row['video_name']}"
    text = row["question"] + "? (A) yes; (B) no."
    return _Asked(text, options, options, options.index(row["answer"]), video, f"{video}.mp4")


def _mv_bench(row: Mapping[str, Any]) -> _Asked:
    options = row["candidates"]
    text = _with_options(row["question"], options)
    lettered = [f"({letter}) {option}" for letter, option in zip(_LETTERS, options)]
    frames = f"{row['subset']}/{row['video']}"
    return _Asked(text, lettered, lettered, options.index(row["answer"]), frames, frames)


_FORMS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], _Asked]]] = {
    "Video-MME": (("question", "options", "answer", "videoID"), _video_mme),
    "NExTQA": (("question", "answer", "video", "a0", "a1", "a2", "a3", "a4"), _next_qa),
    "EgoSchema": (("question", "option", "answer", "video_idx"), _ego_schema),
    "ActivityNetQA": (("question", "answer", "video_name"), _activity_net),
    "MVBench": (("question", "candidates", "answer", "video"), _mv_bench),
}


def read_video_question(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a question answering task."""
    columns, form = _FORMS[task.name]
    rows, source = _question_rows(task, sources, columns)
    queries, answers, candidates = [], [], []
    for number, row in enumerate(rows):
        try:
            asked = form(row)
            right = asked.names[asked.right]
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise BenchmarkDataError(
                f"{task.name}: the answer {row.get('answer')!r} of row {number} is none of its options ({error!r})"
            ) from error
        frames = sources.frames(task, asked.frames, asked.video)
        queries.append(TaskItem((("video", frames), ("text", asked.text)), task.query_instruction))
        answers.append(RankingRow({right: 1.0}, tuple(asked.names)))
        named = zip(asked.names, asked.answers, strict=True)
        candidates += [(name, text_item(answer)) for name, answer in named]
    return gather(task, source, queries, answers, candidates)


def _question_rows(
    task: MMEBTask, sources: MMEBSources, columns: Sequence[str]
) -> tuple[list[Mapping[str, Any]], str]:
    if task.name != "MVBench":
        table, source = sources.table(task)
        require_columns(table, columns, task.name)
        return list(sources.rows(task, table)), source
    rows: list[Mapping[str, Any]] = []
    source = ""
    for subset in MVBENCH_SUBSETS:
        table, source = sources.table(task, subset)
        require_columns(table, columns, f"{task.name}, {subset}")
        rows += [row | {"subset": subset} for row in sources.rows(task, table)]
    return rows, f"{task.repository}, {len(MVBENCH_SUBSETS)} configurations, {task.split}"

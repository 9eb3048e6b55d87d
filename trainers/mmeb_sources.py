"""Where MMEB-V2 lies: the official folder, its tables, its pictures and its frames.

The folder is what `hf download --repo-type dataset TIGER-Lab/MMEB-V2` gives, unpacked: `image-tasks/`, `video-tasks/`
and `visdoc-tasks/`. Annotations are looked for beside the media and on the Hub.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mmeb_tasks import MEDIA_REPOSITORY, MMEBTask
from .ranking_tables import open_table
from .ranking_task import BenchmarkDataError, FrameFolder, RankingRow, RankingTask, TaskItem


_IMAGE_FOLDERS = ("image-tasks", "image-tasks/MMEB", "image-tasks/images")


@dataclass(frozen=True)
class MMEBSources:
    """
    Args:
        folder (`Path`): the benchmark's folder.
        label_names (`Path`, *optional*): class names of the video classification tasks, see `video_labels`.
        limit (`int`, *optional*): rows of each task that are read; all when left out.
    """

    folder: Path
    label_names: Path | None = None
    limit: int | None = None

    def table(self, task: MMEBTask, subset: str | None = None, config: str | None = None) -> tuple[Any, str]:
        """
        Opens a table of a task.

        Args:
            task (`MMEBTask`): the task.
            subset (`str`, *optional*): a configuration in place of the task's.
            config (`str`, *optional*): `"queries"`, `"corpus"` or `"qrels"` of a BEIR data set.

        Returns:
            `tuple[Dataset, str]`: the table and where it came from.
        """
        top = f"{task.modality}-tasks"
        short = task.repository.partition("/")[2]
        places = [
            *(self.folder / top / name for name in dict.fromkeys((short, task.name))),
            *(self.folder / top / "data" / name for name in dict.fromkeys((short, task.name))),
            self.folder / short,
        ]
        if task.modality == "image":
            places = [self.folder / top, self.folder / top / short, self.folder / short]
        return open_table(places, task.repository, config or subset or task.subset, task.split)

    def rows(self, task: MMEBTask, table: Any) -> Any:
        """Returns the rows of a table that are scored."""
        count = min(len(table), self.limit or len(table), task.max_rows or len(table))
        return table.select(range(count)) if count < len(table) else table

    def image_root(self, task: MMEBTask, example: str) -> Path:
        """Returns the folder that the paths of a task's rows start from."""
        for name in _IMAGE_FOLDERS:
            if (self.folder / name / example).is_file():
                return self.folder / name
        raise BenchmarkDataError(
            f"{task.name}: the picture {example} is in none of {', '.join(_IMAGE_FOLDERS)} below {self.folder}; "
            f"download and unpack image-tasks/mmeb_v1.tar.gz of {MEDIA_REPOSITORY}"
        )

    def frames(self, task: MMEBTask, name: str, video: str | None = None, saved: int = 64) -> FrameFolder:
        """
        Returns the saved frames of a video.

        Args:
            task (`MMEBTask`): the task.
            name (`str`): folder of the frames below the task's.
            video (`str`, *optional*): the video's file below the task's folder of videos.
            saved (`int`, *optional*, defaults to 64): frames saved of a video at most.
        """
        videos = self.folder / task.media.replace("/frames/", "/videos/")
        return FrameFolder(self.folder / task.media / name, videos / video if video else None, saved)


def gather(
    task: MMEBTask,
    source: str,
    queries: Sequence[TaskItem],
    rows: Sequence[RankingRow],
    candidates: Sequence[tuple[str, TaskItem]],
) -> RankingTask:
    """
    Puts a task together; of candidates of one name the first counts, as in the official code.

    Args:
        task (`MMEBTask`): what it is.
        source (`str`): where its rows came from.
        queries (`Sequence[TaskItem]`): the queries.
        rows (`Sequence[RankingRow]`): their answers.
        candidates (`Sequence[tuple[str, TaskItem]]`): names and candidates.

    Returns:
        [`RankingTask`]
    """
    pool: dict[str, TaskItem] = {}
    for name, item in candidates:
        pool.setdefault(name, item)
    return RankingTask(task.name, task.group, task.metric, queries, rows, pool, source, task.expected_rows)


def text_item(text: str, instruction: str = "") -> TaskItem:
    """Returns an item that is one text."""
    return TaskItem((("text", text),), instruction)


Reader = Callable[[MMEBTask, MMEBSources], RankingTask]

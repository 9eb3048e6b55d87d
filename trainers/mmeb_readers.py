"""MMEB-V2: which reader reads which task."""

from .mmeb_image import read_image_image, read_image_text, read_text_image
from .mmeb_pages import read_pages
from .mmeb_questions import read_video_question
from .mmeb_sources import MMEBSources, Reader
from .mmeb_tasks import MMEBTask
from .mmeb_video import read_moment, read_moment_seeker, read_text_video, read_video_choice, read_video_label
from .ranking_task import RankingTask, check_ranking_task


READERS: dict[str, Reader] = {
    "image-text": read_image_text,
    "text-image": read_text_image,
    "image-image": read_image_image,
    "video-label": read_video_label,
    "video-choice": read_video_choice,
    "video-question": read_video_question,
    "text-video": read_text_video,
    "moment": read_moment,
    "moment-seeker": read_moment_seeker,
    "pages": read_pages,
}


def read_mmeb_task(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """
    Reads a task from its official layout and checks it.

    Args:
        task (`MMEBTask`): the task.
        sources (`MMEBSources`): where its data are.

    Returns:
        [`RankingTask`]

    Raises:
        BenchmarkDataError: data are missing or not as the layout says.
    """
    read = READERS[task.reader](task, sources)
    check_ranking_task(read)
    return read

"""mteb's own conformance suite, with the model wrapped as mteb documents it.

Its video tasks decode with torchcodec, which needs FFmpeg's shared libraries. PyAV brings them along under names of
its own; the suite runs in a process that finds them under FFmpeg's names: nothing need be installed on the system.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import av
import pytest

from moemb.trainers.repository import assemble_repository

from ..processors import lean_processor
from .embedders import build


SCRIPT = """
    import json, sys
    from mteb.mocks.mock_run import mock_run
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from mteb.results.task_result import TaskResult
    from sentence_transformers import SentenceTransformer

    wrapper = SentenceTransformerEncoderWrapper(SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu"))
    about = {"name": "moemb/tiny", "revision": "r1", "modalities": ["text", "image", "video"]}
    wrapper.mteb_model_meta = wrapper.mteb_model_meta.model_copy(update=about)
    tasks = mock_run(wrapper).task_results
    status = {
        name: "passed" if isinstance(task, TaskResult) else task and task.exception for name, task in tasks.items()
    }
    json.dump(status, open(sys.argv[2], "w"))
"""


def ffmpeg_of_pyav(folder: Path) -> Path:
    """Links to the FFmpeg libraries inside PyAV's wheel, under their own names and under FFmpeg's."""
    folder.mkdir()
    for library in (Path(av.__file__).parents[1] / "av.libs").glob("*.so*"):
        (folder / library.name).symlink_to(library)
        plain = re.sub(r"-[0-9a-f]{8}\.so\.(\d+).*", r".so.\1", library.name)
        if plain != library.name:
            (folder / plain).symlink_to(library)
    return folder


@pytest.mark.slow
def test_text_image_and_video_tasks(tmp_path, tiny_settings):
    processor = lean_processor()
    model = build(tiny_settings, processor)
    folder = assemble_repository(tmp_path / "tiny", model=model, processor=processor)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MTEB_CACHE": str(tmp_path / "cache")}
    libraries = [str(ffmpeg_of_pyav(tmp_path / "ffmpeg")), os.environ.get("LD_LIBRARY_PATH")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    target = tmp_path / "status.json"
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(target)], check=True, env=environment
    )
    status = {name: state for name, state in json.loads(target.read_text()).items() if state is not None}
    assert {name: state for name, state in status.items() if state != "passed"} == {}
    assert sum("Video" in name for name in status) >= 7
    assert sum("Image" in name or "Visi" in name or "Any2Any" in name for name in status) >= 12
    assert len(status) >= 50

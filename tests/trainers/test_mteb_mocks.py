"""mteb's own check of model implementations: its mock tasks of text, pictures and video, through both wrappers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID

from moemb.trainers.repository import assemble_repository

from ..modeling_moemb.embedders import build
from ..processors import lean_processor


ROOT = Path(__file__).parents[2]
KINDS = {task.metadata.name: set(task.metadata.modalities) for task in ALL_MOCK_TASK_TEST_GRID}
OURS = {name for name, kinds in KINDS.items() if kinds <= {"text", "image", "video"}}


@pytest.fixture(scope="module")
def scores(tmp_path_factory, tiny_settings):
    base, processor = tmp_path_factory.mktemp("mocks"), lean_processor()
    folder = assemble_repository(base / "tiny", model=build(tiny_settings, processor), processor=processor)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.trainers.mteb_mocks", str(folder), str(base)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((base / "scores.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ours", "plain"])
@pytest.mark.parametrize("kind", ["text", "image", "video"])
def test_every_task_of_a_kind_passes(scores, wrapper, kind):
    names = {name for name in OURS if kind in KINDS[name]}
    assert len(names) >= 7
    failed = {name: said for name, said in scores[wrapper].items() if name in names and not isinstance(said, float)}
    assert failed == {}


@pytest.mark.slow
def test_both_wrappers_score_the_same(scores):
    """Texts alone: the pictures of the mock tasks are others in each run. Only sound is beyond the model."""
    assert {name for name, said in scores["ours"].items() if said is None} == KINDS.keys() - OURS
    asked = {task.metadata.name for task in ALL_MOCK_TASK_TEST_GRID if task.metadata.prompt}
    same = {name for name in OURS if KINDS[name] == {"text"} and name not in asked}
    assert len(same) >= 20
    differing = {n: (scores["ours"][n], scores["plain"][n]) for n in same if scores["ours"][n] != scores["plain"][n]}
    assert differing == {}

"""A program: mteb's mock tasks through our encoder and through the plain wrapper of Sentence Transformers.

    python -m tests.trainers.mteb_mocks REPOSITORY CACHE

writes `CACHE/scores.json`: by wrapper and task the main score, or the text of the error, or null where mteb finds the
task unfit for the model.
"""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import av
import datasets
import mteb
import numpy as np
import torch
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.mteb_encoder import MoEMBEncoder, model_meta


class Clip:
    """What mteb uses of torchcodec's decoder, read by PyAV: torchcodec needs an FFmpeg on the machine."""

    def __init__(self, value: dict):
        with av.open(io.BytesIO(value["bytes"])) as container:
            rate = float(container.streams.video[0].average_rate)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        self.frames = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)  # (frames, 3, height, width), uint8
        self.metadata = SimpleNamespace(num_frames=len(frames), end_stream_seconds=len(frames) / rate)

    def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
        return SimpleNamespace(data=self.frames[indices])


def encoders(folder: Path, cache: Path):
    """Our encoder, and mteb's wrapper as the how-to sets it up."""
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    meta = model_meta(model, "tiny", "f" * 40, folder)
    yield "ours", MoEMBEncoder(model, meta, EvaluationConventions(), cache / "vectors", ALL_MOCK_TASK_TEST_GRID)
    plain = SentenceTransformerEncoderWrapper(model)
    plain.mteb_model_meta = meta
    yield "plain", plain


def outcome(status) -> float | str | None:
    if isinstance(status, TaskResult):
        return float(status.get_score())
    return None if status is None else status.exception


def main(folder: str, cache: str) -> None:
    datasets.Video.decode_example = lambda feature, value, **_: Clip(value)
    found = {}
    for name, encoder in encoders(Path(folder), Path(cache)):
        found[name] = {task: outcome(status) for task, status in mteb.mock_run(encoder).items()}
    (Path(cache) / "scores.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

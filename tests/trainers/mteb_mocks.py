"""A program: mteb's mock tasks through our encoder and through the plain wrapper of Sentence Transformers.

    python -m tests.trainers.mteb_mocks REPOSITORY CACHE

writes `CACHE/scores.json`: by wrapper and task the main score, or the text of the error, or null where mteb finds the
task unfit for the model.
"""

import json
import sys
from pathlib import Path

import mteb
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.mteb_encoder import MoEMBEncoder, model_meta


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
    found = {}
    for name, encoder in encoders(Path(folder), Path(cache)):
        found[name] = {task: outcome(status) for task, status in mteb.mock_run(encoder).items()}
    (Path(cache) / "scores.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.evaluation_encoding import EncodingError
from moemb.trainers.ranking_encoding import TaskEncoder, TaskVectors
from moemb.trainers.ranking_items import ItemPresenter
from moemb.trainers.ranking_task import TaskItem, media_identity

from .benchmark_trees import BLUE, RED, ColourModel, picture


def texts(*values, instruction=""):
    return [TaskItem((("text", value),), instruction) for value in values]


def encoder(model, cache, conventions=None, **settings):
    presenter = ItemPresenter(conventions or EvaluationConventions(), model.prompts)
    return TaskEncoder(model, presenter, cache, **({"batch_size": 2, "progress": False} | settings))


def test_each_distinct_item_is_encoded_once_and_kept(tmp_path):
    model = ColourModel()
    vectors = encoder(model, tmp_path).encode("t", texts("red", "blue", "red"), "query")
    assert len(model.items) == 2 and np.array_equal(vectors[0], vectors[2])
    assert vectors.dtype == np.float32 and np.allclose(np.linalg.norm(vectors, axis=1), 1)
    again = ColourModel()
    assert np.array_equal(encoder(again, tmp_path).encode("t", texts("red", "blue", "red"), "query"), vectors)
    assert again.items == []


def test_a_killed_evaluation_has_lost_one_batch_at_most(tmp_path):
    items = texts(*(f"red {'blue ' * number}" for number in range(10)))
    with pytest.raises(KeyboardInterrupt):  # raised before the fourth batch of two is done
        encoder(ColourModel(fail_after=3), tmp_path).encode("t", items, "query")
    model = ColourModel()
    vectors = encoder(model, tmp_path).encode("t", items, "query")
    assert len(model.items) == 10 - 6
    assert np.array_equal(vectors, encoder(ColourModel(), tmp_path / "fresh").encode("t", items, "query"))


@pytest.mark.slow
def test_a_process_that_is_killed_for_good_has_lost_one_batch_at_most(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from tests.trainers.benchmark_trees import ColourModel
        from tests.trainers.test_ranking_encoding import encoder, texts
        class Killed(ColourModel):
            def encode(self, *args, **kwargs):
                if len(self.batches) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().encode(*args, **kwargs)
        encoder(Killed(), Path(sys.argv[1])).encode("t", texts(*map(str, range(10))), "query")
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], cwd=root)
    assert done.returncode == -9
    model = ColourModel()
    encoder(model, tmp_path).encode("t", texts(*map(str, range(10))), "query")
    assert len(model.items) == 4


def test_a_batch_never_mixes_prompts(tmp_path):
    model = ColourModel({"query": "Q", "document": "D"})
    items = [*texts("a", "b", "c", instruction="One:"), *texts("d", instruction="Two:"), *texts("e")]
    encoder(model, tmp_path).encode("t", items, "query")
    assert sorted((batch.prompt, len(batch.inputs)) for batch in model.batches) == [
        ("One:", 1), ("One:", 2), ("Q", 1), ("Two:", 1),
    ]  # fmt: skip


def test_settings_that_change_vectors_keep_them_apart_and_variants_do_not(tmp_path):
    counts = []
    for settings, conventions in (
        ({}, {}),
        ({}, {"dataset_variants": "original"}),
        ({"max_length": 64}, {}),
        ({"max_pixels": 4096}, {}),
        ({"adaptive_compute": {"top_k": 1}}, {}),
        ({}, {"num_frames": 4}),
    ):
        model = ColourModel()
        encoder(model, tmp_path, EvaluationConventions(**conventions), **settings).encode("t", texts("red"), "query")
        counts.append(len(model.items))
    assert counts == [1, 0, 1, 1, 1, 1]


def test_limits_and_budget_reach_the_model(tmp_path):
    model = ColourModel()
    settings = {"max_length": 64, "max_pixels": 4096, "adaptive_compute": {"top_k": 1}}
    encoder(model, tmp_path, EvaluationConventions(num_frames=5), **settings).encode("t", texts("red"), "query")
    (batch,) = model.batches
    assert batch.settings["adaptive_compute"] == {"top_k": 1}
    assert batch.settings["processing_kwargs"] == {
        "text": {"max_length": 64}, "image": {"max_pixels": 4096}, "video": {"num_frames": 5},
    }  # fmt: skip


def test_the_batches_of_a_finished_side_become_one_file(tmp_path):
    made = encoder(ColourModel(), tmp_path)
    made.encode("t", texts(*"abcdefg"), "query")
    (folder,) = {path.parent for path in tmp_path.rglob("*.npz")}
    assert len(list(folder.glob("*.npz"))) == 1 and len(TaskVectors(folder).vectors) == 7


def test_pictures_that_change_are_encoded_again(tmp_path):
    path = picture(RED, tmp_path / "a.png")
    before = media_identity(path)
    model = ColourModel()
    first = encoder(model, tmp_path / "v").encode("t", [TaskItem((("image", path),))], "document")
    picture(BLUE, path, size=16)
    assert media_identity(path) != before
    second = encoder(model, tmp_path / "v").encode("t", [TaskItem((("image", path),))], "document")
    assert len(model.items) == 2 and not np.allclose(first, second)


def test_a_broken_item_is_named_and_the_others_are_kept(tmp_path):
    class Broken(ColourModel):
        def encode(self, inputs, **kwargs):
            if any("zz" in part["text"] for item in inputs for part in item):
                raise ValueError("item 0: it cannot be read")
            return super().encode(inputs, **kwargs)

    items = texts("a", "b", "zz")
    with pytest.raises(EncodingError, match="task: a batch cannot be encoded .*; its items are: .*text 'zz'"):
        encoder(Broken(), tmp_path, batch_size=1).encode("task", items, "query")
    model = ColourModel()
    encoder(model, tmp_path).encode("task", items, "query")
    assert len(model.items) == 1


def test_vectors_that_are_not_finite_name_their_item(tmp_path):
    model = ColourModel()
    model.encode = lambda inputs, **_: np.full((len(inputs), 2), np.nan)
    with pytest.raises(EncodingError, match="task: 1 vectors are not finite, such as that of text 'cat'"):
        encoder(model, tmp_path).encode("task", texts("cat"), "query")


@pytest.mark.slow
def test_two_processes_share_the_work_and_agree(tmp_path):
    """Started as torchrun starts them: each encodes half of the batches, both return all vectors."""
    script = """
        import json, sys
        from pathlib import Path
        import numpy as np
        from tests.trainers.benchmark_trees import ColourModel
        from tests.trainers.test_ranking_encoding import encoder, texts
        model = ColourModel()
        made = encoder(model, Path(sys.argv[1]))
        vectors = made.encode("t", texts(*("red " * n for n in range(9))), "query")
        vectors = np.concatenate([vectors, made.encode("t", texts("blue"), "document")])
        Path(sys.argv[2]).write_text(json.dumps({"items": len(model.items), "vectors": vectors.tolist()}))
    """
    root = Path(__file__).parents[2]
    processes = []
    for rank in range(2):
        settings = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = (
            os.environ | settings | {"MASTER_PORT": str(20_000 + os.getpid() % 20_000), "OMP_NUM_THREADS": "1"}
        )
        command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "v"), str(tmp_path / f"{rank}.json")]
        processes.append(subprocess.Popen(command, cwd=root, env=environment))
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["vectors"] == second["vectors"] and len(first["vectors"]) == 10
    assert first["items"] + second["items"] == 10 and min(first["items"], second["items"]) >= 4

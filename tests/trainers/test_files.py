import pytest

from moemb.trainers.files import put_in_place, whole_file, write_atomically


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "folder" / "a.json"
    write_atomically(path, "é")
    assert path.read_bytes() == "é".encode()
    write_atomically(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_after_an_error_the_old_file_stands_alone(tmp_path):
    path = tmp_path / "a.npz"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), whole_file(path) as partial:
        partial.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_what_is_unfinished_is_not_found_under_the_suffix(tmp_path):
    with whole_file(tmp_path / "a.npz") as partial:
        partial.write_text("half")
        assert list(tmp_path.glob("*.npz")) == []


def test_a_folder_takes_the_place_of_another(tmp_path):
    draft, target = tmp_path / "draft", tmp_path / "target"
    for folder, name in ((draft, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).touch()
    (tmp_path / ".target.old").mkdir()  # of a process that was killed in between
    put_in_place(draft, target)
    assert [file.name for file in target.iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["target"]

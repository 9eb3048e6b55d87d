"""Which files of a folder are read, and what becomes of texts."""

import os

import pytest

from moemb.trainers.rag_files import DataFolderError, digest_of, kind_of_name, scan_folder
from moemb.trainers.rag_text import decode_text, html_to_text, split_passages


def test_kinds_by_extension_whatever_its_case():
    assert [kind_of_name(name) for name in ("a.JPG", "b.mp4", "c.Pdf", "d.md", "e.html", "f.docx", "g")] == [
        "image", "clip", "pdf", "text", "text", None, None,
    ]  # fmt: skip


def test_everything_is_read_or_has_a_reason(tmp_path):
    for name in ("a.png", "sub/b.txt", "c.zip", ".hidden.png", ".git/d.png", "__pycache__/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty.pdf").touch()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "linked.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "sub/loop").symlink_to(tmp_path, target_is_directory=True)
    os.close(os.open(os.fsencode(tmp_path) + b"/b\xff.txt", os.O_CREAT))
    scan = scan_folder(tmp_path)
    assert {path: state.kind for path, state in scan.files.items()} == {
        "a.png": "image", "linked.png": "image", "sub/b.txt": "text",
    }  # fmt: skip
    reasons = {"c.zip": ".zip", "empty.pdf": "0 bytes", "pipe.txt": "pipe", "nowhere.png": "nothing",
               "b\\xff.txt": "UTF-8"}  # fmt: skip
    assert set(scan.skipped) == set(reasons)
    for path, words in reasons.items():
        assert words in scan.skipped[path]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataFolderError, match=r"'.*nowhere'"):
        scan_folder(tmp_path / "nowhere")


def test_bytes_and_files_have_the_same_digest(tmp_path):
    (tmp_path / "a").write_bytes(b"content" * 100_000)
    assert digest_of(tmp_path / "a") == digest_of(b"content" * 100_000) != digest_of(b"content")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Straße".encode(), "Straße"),
        ("Straße".encode("utf-8-sig"), "Straße"),
        ("Straße".encode("utf-16"), "Straße"),
        ("Straße".encode("cp1252"), "Straße"),
        (b"a\r\nb\rc", "a\nb\nc"),
    ],
)
def test_texts_in_the_encodings_that_people_have(data, text):
    assert decode_text(data) == text


def test_binary_files_are_no_texts():
    with pytest.raises(ValueError, match="zero bytes"):
        decode_text(b"PK\x03\x04\0\0\0")


def test_html_is_what_a_browser_shows():
    source = "<title>T</title><style>p{}</style><h1>Head</h1><p>One\n two &amp; three<br>four<script>no()</script></p>"
    assert html_to_text(source).split("\n\n") == ["T", "Head", "", "One two & three\nfour", ""]


@pytest.mark.parametrize("most", [50, 120, 600])
def test_passages_are_short_and_lose_nothing(most):
    text = "\n\n".join(f"Paragraph {n}. " + "A sentence of some words! " * (n % 7) + "x" * (n * 9) for n in range(30))
    passages = split_passages(text, most)
    assert all(0 < len(passage) <= most for passage in passages)
    assert "".join("".join(passages).split()) == "".join(text.split())


def test_short_paragraphs_share_a_passage_and_sentences_stay_whole():
    assert split_passages("One.\n\nTwo.\n\n\n\nThree.", 12) == ["One.\n\nTwo.", "Three."]
    assert split_passages("First one here. Second one.", 20) == ["First one here.", "Second one."]
    assert split_passages(" \n\n ") == []

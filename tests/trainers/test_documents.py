import numpy as np
import pytest

from moemb.trainers.corpus_render import MOTIONS
from moemb.trainers.documents import DocumentSource
from moemb.trainers.pretrain_trainer import DOCUMENT_KINDS


@pytest.fixture(scope="module")
def source(fake_corpus):
    return DocumentSource(fake_corpus)


def documents(source, kind, seed=0):
    return [sample.parts for sample in source.documents(kind, 8, np.random.default_rng(seed))]


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_documents_are_repeatable_and_of_training_rows(source, kind):
    first, again = documents(source, kind), documents(source, kind)
    assert len(first) == 8
    for parts, same in zip(first, again, strict=True):
        assert all(np.array_equal(part, other) for part, other in zip(parts, same, strict=True))
        words = parts[-1].replace(":", " ").replace(",", " ").split()
        assert all(int(word) < 16 for word in words if word.isdigit())


def test_an_emoji_document_is_one_or_two_pictures_and_lines_in_several_languages(source):
    drawn = [parts for seed in range(8) for parts in documents(source, "emoji", seed)]
    assert {len(parts) for parts in drawn} == {2, 3}
    lines = drawn[0][-1].split("\n")
    assert lines[0].startswith("thing number")
    assert any(line.split(":")[0] in ("fr", "de", "es", "ja", "zh", "hi", "ru") for line in lines[1:])


def test_the_other_kinds(source):
    assert all(parts[0].shape == (8, 64, 64, 3) and parts[1].endswith(MOTIONS) for parts in documents(source, "clip"))
    assert all(parts[0].shape == (32, 128, 3) for parts in documents(source, "strip"))
    assert all(parts[0].startswith("en: thing") for parts in documents(source, "translation"))
    assert all("meaning of word" in parts[0] for parts in documents(source, "gloss"))
    assert all(parts[1].startswith("icon") for parts in documents(source, "icon"))


def test_an_unknown_kind_is_an_error(source):
    with pytest.raises(KeyError, match="poem"):
        documents(source, "poem")

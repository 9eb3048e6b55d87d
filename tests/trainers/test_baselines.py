import numpy as np
import pytest

from moemb.trainers.baselines import (
    bm25_system,
    bm25_words,
    cosine_system,
    histogram_vectors,
    image_baselines,
    pixel_vectors,
    text_baselines,
    tfidf_system,
    thumbnail,
    unit_rows,
)
from moemb.trainers.evaluation_metrics import rank_queries


def _solid(colour, side=64):
    return np.full((side, side, 3), colour, dtype=np.uint8)


def test_texts_without_a_known_word_score_nothing_and_are_no_hits():
    documents = ["red apple", "green pear", "blue plum"]
    for system in text_baselines(["qqq", "###", ""], documents):
        assert not system.scores(0, 3).any()
        assert rank_queries(system.scores, [[0], [1], [2]]).rank.tolist() == [3, 3, 3]


@pytest.mark.parametrize("build", [tfidf_system, bm25_system])
def test_text_systems_find_the_document_that_shares_words(build):
    documents = ["a red apple on the table", "green pears grow on trees", "the blue plum"]
    system = build(["pears", "apple", "a plum"], documents)
    assert system.scores(0, 3).argmax(axis=1).tolist() == [1, 0, 2]
    assert system.scores(1, 2).shape == (1, 3)


def test_bm25_agrees_with_its_formula():
    documents = ["cat cat dog", "dog", "bird bird bird bird"]
    score = bm25_system(["cat"], documents).scores(0, 1)[0]
    idf = np.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 * 2.2 / (2 + 1.2 * (1 - 0.75 + 0.75 * 3 / (8 / 3)))
    assert score[0] == pytest.approx(expected, rel=1e-5)
    assert score[1:].tolist() == [0.0, 0.0]


def test_bm25_survives_empty_documents():
    assert bm25_system(["cat"], ["", ""]).scores(0, 1).tolist() == [[0.0, 0.0]]
    assert tfidf_system(["cat"], ["", ""]).scores(0, 1).shape == (1, 2)


def test_signs_of_scripts_without_spaces_are_words():
    assert bm25_words("赤いリンゴ and Äpfel") == ["赤", "い", "リ", "ン", "ゴ", "and", "äpfel"]


def test_histogram_ignores_places_and_pixels_do_not():
    halves = np.concatenate([_solid(0)[:32], _solid((255, 0, 0))[:32]])
    swapped = halves[::-1].copy()
    histogram = unit_rows(histogram_vectors([halves, swapped]))
    pixels = unit_rows(pixel_vectors([halves, swapped]))
    assert histogram[0] @ histogram[1] == pytest.approx(1.0)
    assert pixels[0] @ pixels[1] < 0.99


def test_image_baselines_take_any_size_and_find_the_same_picture():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    queries = [_solid(colour, side=30) for colour in colours]
    documents = [_solid(colour) for colour in reversed(colours)]
    for system in image_baselines(queries, documents):
        assert system.scores(0, 3).argmax(axis=1).tolist() == [2, 1, 0]


def test_thumbnail_scales_to_a_square():
    assert thumbnail(np.zeros((32, 128, 3), np.uint8)).shape == (64, 64, 3)


def test_a_zero_vector_is_alike_to_nothing():
    system = cosine_system("x", np.zeros((1, 4)), np.eye(4))
    assert system.scores(0, 1).tolist() == [[0.0] * 4]

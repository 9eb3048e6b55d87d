import numpy as np
import pytest

from moemb.trainers.corpus_render import MOTIONS
from moemb.trainers.sources import (
    EmojiSource,
    IconSource,
    MotionSource,
    SkinEditSource,
    StripSource,
    TextPairSource,
    TranslationSource,
)


ALL = {
    "emoji": (EmojiSource, {}),
    "icon": (IconSource, {}),
    "translation": (TranslationSource, {}),
    "gloss": (TextPairSource, {"pair_sources": ("wordnet",), "name": "gloss"}),
    "strip": (StripSource, {}),
    "motion": (MotionSource, {}),
    "edit": (SkinEditSource, {}),
}


def build(name, corpus, chunk):
    source_class, extra = ALL[name]
    return source_class(corpus, chunk, corpus.text_teacher()[0], corpus.vision_teacher()[0], **extra)


def draw(source, seed=0):
    return source.draw(np.arange(source.chunk) % source.size, np.random.default_rng(seed))


def texts(group):
    return [part for sample in group.samples for part in sample.parts if isinstance(part, str)]


@pytest.mark.parametrize("name", ALL)
def test_a_sub_batch_is_sound(name, fake_corpus):
    source = build(name, fake_corpus, 4)
    group, again = draw(source), draw(source)
    assert group.source == source.name == name
    for contrast in group.contrasts:
        rows = contrast.queries + contrast.documents
        assert min(rows) >= 0 and max(rows) < len(group.samples)
        documents = {group.keys[row] for row in contrast.documents}
        assert {group.keys[row] for row in contrast.queries} <= documents  # every query has a right document
    assert texts(group) == texts(again) and group.keys == again.keys
    for sample, other in zip(group.samples, again.samples, strict=True):
        for part, same in zip(sample.parts, other.parts, strict=True):
            assert np.array_equal(part, same)


@pytest.mark.parametrize("name", ALL)
def test_nothing_but_training_rows_is_drawn(name, fake_corpus):
    source = build(name, fake_corpus, 6)
    for seed in range(6):
        for text in texts(draw(source, seed)):
            numbers = [int(word) for word in text.replace(":", " ").split() if word.isdigit()]
            assert all(number < 16 for number in numbers), text
    keys = [row["key"] for row in fake_corpus.image_rows if row["split"] != "train"]
    drawn = {target for seed in range(6) for target in draw(source, seed).image_targets}
    assert drawn.isdisjoint(keys)


def test_an_emoji_gives_two_styles_and_two_captions_of_one_key(fake_corpus):
    group = draw(build("emoji", fake_corpus, 3))
    assert len(group.samples) == 12
    assert group.keys[:6] == group.keys[6:] and group.keys[0] == group.keys[1]
    assert group.image_targets[6].split("/")[0] != group.image_targets[7].split("/")[0]
    assert group.image_targets[:6] == [None] * 6 and all(group.text_targets)


def test_captions_come_in_many_languages(fake_corpus):
    source = build("emoji", fake_corpus, 8)
    first = {text.split()[0] for seed in range(30) for text in texts(draw(source, seed))}
    assert {"thing", "fr", "ja", "zh", "hi"} <= first


def test_motion_sub_batches_hold_all_motions_of_a_concept_or_bare_labels(fake_corpus):
    source = build("motion", fake_corpus, 16)
    kinds = set()
    for seed in range(12):
        group = draw(source, seed)
        bare = not any(text.endswith(MOTIONS) for text in texts(group))
        kinds.add(bare)
        if not bare:
            assert len(group.samples) == 32
            assert {text.split(" ", 3)[3] for text in texts(group)} == set(MOTIONS)
            assert len({key for key, _ in group.keys}) == 2
        assert group.samples[-1].parts[0].shape == (8, 64, 64, 3)
    assert kinds == {True, False}


def test_an_edit_has_the_other_tones_and_the_unedited_picture_among_its_documents(fake_corpus):
    source = build("edit", fake_corpus, 1)
    group = draw(source)
    (contrast,) = group.contrasts
    assert not contrast.symmetric
    assert [len(group.samples[row].parts) for row in contrast.queries] == [2, 2]
    documents = [group.keys[row] for row in contrast.documents]
    assert len(documents) == 3 and set(group.keys[:2]) == set(documents[1:])
    assert source.size == 4  # two people in two styles

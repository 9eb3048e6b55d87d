import numpy as np
import pytest

from moemb.trainers.corpus_split import (
    LeakageError,
    PhraseSet,
    check_no_leakage,
    concept_family,
    family_split,
    held_out_labels,
    near_duplicates,
)


@pytest.mark.parametrize(
    "labels",
    [
        ("mage", "man mage", "woman mage"),
        ("person walking", "woman walking: facing right", "man walking"),
        ("old man", "older person", "old woman"),
        ("family: man, woman, girl, boy", "family: adult, child", "family"),
        ("kiss", "kiss: woman, man"),
        ("prince", "princess", "person with crown"),
        ("mermaid", "merman", "merperson"),
        ("Santa Claus", "Mrs. Claus", "Mx Claus"),
        ("people holding hands", "woman and man holding hands"),
    ],
)
def test_forms_of_one_thing_are_one_family(labels):
    assert len({concept_family(label) for label in labels}) == 1


@pytest.mark.parametrize(
    "pair", [("dog face", "cat face"), ("man’s shoe", "woman’s hat"), ("red apple", "green apple"), ("mage", "elf")]
)
def test_different_things_are_different_families(pair):
    assert concept_family(pair[0]) != concept_family(pair[1])


def test_family_split_is_fixed_and_has_the_asked_shares():
    assert (family_split("robot"), family_split("owl"), family_split("mage")) == ("test", "validation", "train")
    splits = [family_split(f"family {number}") for number in range(20000)]
    assert splits.count("test") / 20000 == pytest.approx(0.10, abs=0.01)
    assert splits.count("validation") / 20000 == pytest.approx(0.05, abs=0.01)
    assert family_split("anything", 0, 0) == "train"


def test_phrases_are_found_as_whole_words_in_any_number():
    phrases = PhraseSet(["robot", "hot dog", "x-ray"])
    assert phrases.found_in("Robots off") == "robot"
    assert phrases.found_in("a hot_dogs stand") == "hot dog"
    assert phrases.found_in("x ray") == "x ray"
    assert phrases.found_in("robotics") is None
    assert phrases.found_in("hot cat dog") is None
    assert phrases.equals("Robots") and not phrases.equals("robot arm")
    assert PhraseSet([]).found_in("anything") is None


def concept(label, split, base=None):
    return {"en": label, "base": base, "family": concept_family(label.split(":")[0]), "split": split}


def corpus_parts():
    concepts = {
        "a": concept("mage", "train"),
        "a1": concept("mage: dark skin tone", "train", "a"),
        "b": concept("robot", "test"),
    }
    rows = [
        {"key": "noto/a", "source": "noto", "concept": "a", "text": "mage", "tags": [], "split": "train"},
        {"key": "noto/b", "source": "noto", "concept": "b", "text": "robot", "tags": [], "split": "test"},
        {"key": "mdi/home", "source": "mdi", "concept": None, "text": "home", "tags": ["house"], "split": "train"},
    ]
    pairs = [{"query": "a dwelling", "document": "house, home", "source": "wordnet", "split": "train"}]
    return concepts, rows, pairs


def test_a_clean_corpus_passes():
    assert check_no_leakage(*corpus_parts()) == {"families": 2, "images": 3, "text_pairs": 1}
    assert len(held_out_labels(corpus_parts()[0])) == 1


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda c, r, p: r[1].update(split="train"), "noto/b"),
        (lambda c, r, p: r[0].update(source="twemoji"), "held-out artist"),
        (lambda c, r, p: r[2].update(text="robot off"), "mdi/home"),
        (lambda c, r, p: r[2].update(tags=["robots"]), "'robots'"),
        (lambda c, r, p: p[0].update(document="automaton, Robot"), "automaton, Robot"),
        (lambda c, r, p: p[0].update(document="robot: a machine. Kinds: x, y.", source="wordnet-article"), "robot: a"),
        (lambda c, r, p: c["a1"].update(split="test"), "a1"),
        (lambda c, r, p: c.update(d=concept("woman mage", "test")), "'mage'"),
    ],
)
def test_every_leak_is_found_and_named(spoil, named):
    parts = corpus_parts()
    spoil(*parts)
    with pytest.raises(LeakageError, match="leak") as error:
        check_no_leakage(*parts)
    assert named in str(error.value)


def test_near_duplicates_are_those_of_like_ink():
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    noisy = np.clip(pool[3].astype(int) + rng.integers(-3, 4, (8, 8, 3)), 0, 255).astype(np.uint8)
    other = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert near_duplicates(np.stack([noisy, other]), pool).tolist() == [True, False]
    white = np.full((1, 8, 8, 3), 255, np.uint8)  # no ink at all: like nothing
    assert near_duplicates(white, pool).tolist() == [False]

import pytest

from moemb.trainers.corpus_records import LANGUAGES, code_point_key, emoji_drawings, icon_drawings, read_concepts
from moemb.trainers.corpus_split import held_out_labels
from moemb.trainers.corpus_wordnet import read_synsets, wordnet_articles, wordnet_pairs

from .fake_packages import write_fake_packages


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return write_fake_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def concepts(packages):
    return read_concepts(packages["emojibase"])


def test_concepts_have_labels_families_and_tones(concepts):
    assert set(concepts["1f600"]["labels"]) == set(LANGUAGES)
    assert concepts["1f600"]["labels"]["ja"] == "ja grinning face"
    assert concepts["1f9d9-200d-2640"]["family"] == concepts["1f9d9"]["family"] == "mage"
    hand, dark = concepts["1f44b"], concepts["1f44b-1f3ff"]
    assert (hand["base"], hand["tone"]) == (None, None)
    assert (dark["base"], dark["tone"], dark["family"], dark["split"]) == (
        "1f44b",
        "dark skin tone",
        hand["family"],
        hand["split"],
    )
    assert dark["labels"]["fr"] == "fr waving hand: dark skin tone"
    assert {concepts[code]["split"] for code in ("1f916", "1f528")} == {"test"}
    assert "1f3fb" not in concepts and "1f1e6" not in concepts  # bare tones and letters have no picture of their own


def test_two_toned_variants_name_both_tones():
    from moemb.trainers.corpus_records import _tone_text

    assert _tone_text([1, 5]) == "light skin tone, dark skin tone"


def test_keys_forget_the_presentation_selector():
    assert code_point_key("1F9D9-200D-2640-FE0F") == "1f9d9-200d-2640"


def test_emoji_drawings_follow_aliases_and_splits(packages, concepts):
    drawings = {d.row["key"]: d for d in emoji_drawings("noto", packages["noto"], concepts)}
    assert "noto/1f600" in drawings and "noto/1f1e6-1f1e9" not in drawings
    assert 'viewBox="0 0 32 32"' in drawings["noto/1f600"].svg
    assert drawings["noto/1f916"].row["split"] == "test"
    twemoji = emoji_drawings("twemoji", packages["twemoji"], concepts)
    assert {d.row["split"] for d in twemoji} == {"evaluation"} and all("currentColor" not in d.svg for d in twemoji)


@pytest.mark.parametrize("source", ["mdi", "tabler", "lucide"])
def test_icons_with_a_held_out_label_are_dropped(source, packages, concepts):
    drawings, dropped = icon_drawings(source, packages[source], held_out_labels(concepts))
    assert [d.row["key"] for d in drawings] == [f"{source}/home", f"{source}/book-open"] and dropped == 2
    assert drawings[1].row["text"] == "book open" and drawings[1].row["tags"] == ["reading"]
    assert all(d.row["split"] == "train" and "currentColor" not in d.svg for d in drawings)


def test_wordnet_is_parsed_and_held_out_lemmas_dropped(packages, concepts):
    synsets = read_synsets(packages["wordnet"])
    beagle = synsets["n00000001"]
    assert beagle.lemmas == ["beagle", "beagle dog"] and beagle.gloss == "a small hound used for hunting hares"
    assert (
        beagle.examples == ["the beagle ran"] and beagle.neighbours == [("kind of", "n00000002")] and beagle.topic == 5
    )
    assert synsets["a00000006"].lemmas == ["afloat"]
    pairs, dropped = wordnet_pairs(synsets, held_out_labels(concepts))
    assert dropped == 1 and not any("robot" in pair["document"] for pair in pairs)
    assert pairs[0] == {"query": beagle.gloss, "document": "beagle, beagle dog", "source": "wordnet", "split": "train"}


def test_articles_tell_of_neighbours(packages, concepts, monkeypatch):
    monkeypatch.setattr("moemb.trainers.corpus_wordnet.ARTICLE_WORDS", (10, 110))
    articles = wordnet_articles(read_synsets(packages["wordnet"]), held_out_labels(concepts))
    beagle = next(row for row in articles if row["document"].startswith("beagle"))
    assert beagle["query"] == "a small hound used for hunting hares" and beagle["source"] == "wordnet-article"
    assert "A kind of hound: any of several breeds" in beagle["document"]
    assert any(row["document"].endswith("Kinds: beagle.") for row in articles)
    assert len(wordnet_articles(read_synsets(packages["wordnet"]), held_out_labels(concepts), limit=1)) == 1

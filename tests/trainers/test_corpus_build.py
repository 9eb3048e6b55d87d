import json

import numpy as np
import pytest

from moemb.trainers import corpus_build, corpus_manifest, corpus_teachers
from moemb.trainers.corpus import Corpus, CorpusFileError, load_corpus, read_jsonl
from moemb.trainers.corpus_build import build_corpus
from moemb.trainers.corpus_config import CorpusConfig, CorpusError
from moemb.trainers.corpus_split import check_no_leakage
from moemb.trainers.corpus_stages import Stages
from moemb.trainers.files import write_atomically

from .fake_packages import write_fake_packages


def fake_text_encoder():
    return lambda texts: np.stack([np.full(4, len(text), np.float16) for text in texts])


def fake_vision_encoder():
    return lambda images: images.reshape(len(images), -1)[:, :256].astype(np.float16)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Packages come from disk, and the teachers are cheap functions."""
    packages = write_fake_packages(tmp_path / "packages")
    for module in (corpus_build, corpus_manifest):
        monkeypatch.setattr(module, "fetch", packages.__getitem__)
    monkeypatch.setattr(corpus_build, "fetch_all", lambda keys: None)
    for key in ("minilm", "efficientnet", "efficientnet-code"):
        packages[key] = packages["mdi"]
    monkeypatch.setattr(corpus_teachers, "text_encoder", fake_text_encoder)
    monkeypatch.setattr(corpus_teachers, "vision_encoder", fake_vision_encoder)
    monkeypatch.setattr("moemb.trainers.corpus_wordnet.ARTICLE_WORDS", (10, 110))
    return packages


@pytest.fixture
def corpus(offline, tmp_path):
    return build_corpus(CorpusConfig(output=str(tmp_path / "corpus")))


def test_the_whole_corpus_is_built_and_read(corpus):
    assert corpus.images.shape == (len(corpus.image_rows), 64, 64, 3) and corpus.images.dtype == np.uint8
    assert corpus.clips.shape == (2, 8, 64, 64, 3) and [row["concept"] for row in corpus.clip_rows] == [
        "1f600",
        "1f916",
    ]
    assert {row["split"] for row in corpus.image_rows if row["source"] == "twemoji"} == {"evaluation"}
    assert {corpus.image_rows[row]["source"] for row in corpus.rows("train")} == {
        "noto",
        "fluent",
        "mdi",
        "tabler",
        "lucide",
    }
    assert [corpus.image_rows[row]["concept"] for row in corpus.rows("test", ("noto",))] == ["1f916", "1f528"]
    assert corpus.image_index["fluent/1f600"] in corpus.rows("train", ("fluent",))
    assert corpus.render_strip("beagle").shape == (32, 128, 3)
    assert "beagle" in corpus.strip_texts and not set(corpus.strip_texts) & {
        row["text"] for row in read_jsonl(corpus.folder / "strips.jsonl") if row["split"] != "train"
    }
    assert check_no_leakage(corpus.concepts, corpus.image_rows, corpus.text_pairs)["images"] == len(corpus.images)


def test_skin_triples_join_base_and_target(corpus):
    triples = corpus.skin_triples("noto")
    assert [tone for _, tone, _ in triples] == ["light skin tone", "dark skin tone"]
    for base, _, target in triples:
        assert corpus.image_rows[base]["key"] == "noto/1f44b"
        assert corpus.concepts[corpus.image_rows[target]["concept"]]["base"] == "1f44b"
    assert corpus.skin_triples("noto", "test") == []


def test_teachers_cover_every_training_text_and_image(corpus):
    index, vectors = corpus.text_teacher()
    assert len(index) == len(vectors) and vectors.dtype == np.float16
    for row in corpus.rows("train"):
        item = corpus.image_rows[row]
        texts = [item["text"], *item["tags"], *([", ".join(item["tags"])] if item["tags"] else [])]
        assert all(text in index for text in texts)
        assert item["key"] in corpus.vision_teacher().index
    for pair in corpus.text_pairs:
        assert pair["split"] != "train" or (pair["query"] in index and pair["document"] in index)
    assert all(text in index for text in corpus.strip_texts)
    assert {"grinning face moving left", "dark skin tone", "waving hand: dark skin tone"} <= set(index)
    assert not {"robot", "hammer", "owl", "robot moving left"} & set(index)
    assert corpus.text_teacher().lookup(["grinning face"]).tolist() == [[13.0] * 4]
    with pytest.raises(KeyError, match="'robot'"):
        corpus.text_teacher().lookup(["robot"])
    assert len(corpus.vision_teacher().index) == len(corpus.rows("train"))


def test_manifest_and_attribution_say_what_is_in_it(corpus):
    manifest = corpus.manifest
    assert manifest["packages"]["twemoji"]["licence"] == "CC-BY-4.0"
    assert manifest["images_by_split"]["noto test"] == 2 and manifest["leakage_checked"]["families"] > 5
    assert set(manifest["files"]) >= {"images.npy", "concepts.json", "teachers/captions.npy", "fonts/DejaVuSans.ttf"}
    assert "md5(family) % 100: below 10 test, below 15 validation" in manifest["split_rule"]
    attribution = (corpus.folder / "ATTRIBUTION.md").read_text()
    assert "Twemoji" in attribution and "Princeton" in attribution and "OpenMoji" not in attribution


def test_a_second_build_does_nothing_and_a_damaged_file_is_built_again(corpus, capsys):
    config = CorpusConfig(output=str(corpus.folder))
    capsys.readouterr()
    build_corpus(config)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.endswith("already built") for line in lines)
    before = (corpus.folder / "images.npy").read_bytes()
    (corpus.folder / "images.npy").write_bytes(before[:1000])
    build_corpus(config)
    redone = [
        line.split(":")[0] for line in capsys.readouterr().out.splitlines() if not line.endswith("already built")
    ]
    assert redone == ["images"]
    assert (corpus.folder / "images.npy").read_bytes() == before


def test_two_builds_are_equal_byte_for_byte(corpus, tmp_path):
    other = build_corpus(CorpusConfig(output=str(tmp_path / "other")))
    assert other.manifest["files"] == corpus.manifest["files"]


def test_other_settings_build_again(corpus):
    smaller = build_corpus(
        CorpusConfig(output=str(corpus.folder), image_sources=["noto", "fluent", "twemoji"], clips=False)
    )
    assert {row["source"] for row in smaller.image_rows} == {"noto", "fluent", "twemoji"}
    assert len(smaller.vision_teacher().index) == len(smaller.rows("train"))


def test_a_build_killed_in_a_stage_goes_on_there(offline, tmp_path, monkeypatch, capsys):
    config = CorpusConfig(output=str(tmp_path / "corpus"))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus_build, "wordnet_pairs", killed)
        build_corpus(config)
    capsys.readouterr()
    corpus = build_corpus(config)
    done = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert [done[name] for name in ("concepts", "images", "fonts")] == ["already built"] * 3
    assert len(corpus.text_pairs) > 5
    assert not [path.name for path in corpus.folder.rglob("*.part")]


def test_stages_note_only_what_was_finished(tmp_path):
    stages = Stages(tmp_path)

    def work():
        write_atomically(tmp_path / "a.txt", b"a")
        return {"files": ["a.txt"], "counts": {"letters": 1}}

    assert stages.run("letters", {"case": "low"}, work) and not Stages(tmp_path).run("letters", {"case": "low"}, work)
    assert Stages(tmp_path).run("letters", {"case": "high"}, work)
    (tmp_path / "a.txt").unlink()
    assert Stages(tmp_path).run("letters", {"case": "high"}, work)
    assert json.loads((tmp_path / "stages.json").read_text())["letters"]["counts"] == {"letters": 1}


def test_an_unbuilt_corpus_and_a_broken_row_are_said(tmp_path, monkeypatch):
    with pytest.raises(CorpusFileError, match="moemb data"):
        Corpus(tmp_path)
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path))
    with pytest.raises(CorpusFileError, match="mini-corpus"):
        load_corpus()
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(CorpusFileError, match=r"rows\.jsonl:2 is not JSON"):
        read_jsonl(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_sources": ["noto", "fluent", "twemoij"]}, "'twemoij'; did you mean 'twemoji'"),
        ({"image_sources": ["noto", "mdi", "twemoji"]}, "'fluent' is missing"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"test_percent": 99, "validation_percent": 5}, "some families to train on"),
        ({"evaluation_sets": ["wikis"]}, "'wikis'; did you mean 'wiki'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(CorpusError, match=message):
        CorpusConfig(**settings)

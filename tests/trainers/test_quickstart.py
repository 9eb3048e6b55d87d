import argparse
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moemb.trainers import corpus_gallery, quickstart_model
from moemb.trainers.corpus_tasks import Picture
from moemb.trainers.evaluation_report import OutputError
from moemb.trainers.quickstart import QuickstartError, add_arguments, console_lines, run, tell
from moemb.trainers.quickstart_items import LANGUAGES, build_collection
from moemb.trainers.quickstart_model import CheckpointMissingError, mini_repository
from moemb.trainers.quickstart_page import data_uri, render_page, si
from moemb.trainers.quickstart_search import Index, Meter, count_parameters, counting


NAMED = {"1f3bb": "violin", "1f34b": "lemon", "26f5": "sailboat", "1f418": "elephant <1>", "1f44b": "waving hand"}
UNSEEN = [f"u{number}" for number in range(12)]
TONES = ["dark skin tone", "light skin tone"]


class Gallery:
    """A gallery of flat colours in the shape of the shipped one; the last two unseen things look the same."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "ATTRIBUTION.md").write_text("Pictures by <somebody>, CC-BY-4.0")
        self.concepts = {name: self._concept(label, "train") for name, label in NAMED.items()}
        self.concepts |= {name: self._concept(f"thing {name}", "test") for name in UNSEEN}
        for number, tone in enumerate(TONES):
            self.concepts[f"1f44b-{number}"] = self._concept(f"waving hand: {tone}", "train", "1f44b", tone)
        self.concepts["flag"] = self._concept("a flag", "test") | {"subgroup": "country-flag"}
        self.pictures = {
            "twemoji": [self._picture("twemoji", name) for name in self.concepts],
            "noto": [self._picture("noto", name) for name in UNSEEN],
            "clips": [Picture("anim/1f418", "1f418", np.stack([_colour("1f418")] * 8), False, "1f418")],
            "strips": [
                Picture(f"strip/{title}", title, np.resize(_colour(title), (32, 128, 3)), False, title)
                for title in ("Abacus", "Basilisk", "Cinder", "Dogwood")
            ],
        }
        self.pictures["twemoji"][1] = self._picture("twemoji", "1f34b", near_duplicate=True)

    @staticmethod
    def _concept(label, split, base=None, tone=None):
        labels = {language: f"{label} {language}" for language in LANGUAGES if language != "en"}
        return {
            "en": label,
            "labels": labels,
            "split": split,
            "base": base,
            "tone": tone,
            "subgroup": "objects",
            "trained": split == "train",
        }

    @staticmethod
    def _picture(source, name, near_duplicate=False):
        twin = UNSEEN[-2] if name == UNSEEN[-1] else name
        return Picture(f"{source}/{name}", name, _colour(twin), near_duplicate, twin)


def _colour(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    return np.broadcast_to(rng.integers(0, 255, 3), (64, 64, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    return Gallery(tmp_path_factory.mktemp("gallery"))


@pytest.fixture(scope="module")
def collection(gallery):
    return build_collection(gallery)


class Network(torch.nn.Module):
    """Stands for the model under a `SentenceTransformer`: counts, and has MoEMB's parameter names."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(
            model_type="moemb",
            text_config=SimpleNamespace(num_experts=8, num_experts_per_tok=2),
            vision_config=SimpleNamespace(spatial_merge_size=2),
        )
        sizes = {
            "language_model__embed_tokens__weight": 100,
            "language_model__layers__0__mlp__experts__down_proj": 80,
            "language_model__norm__weight": 5,
            "visual__blocks__0__weight": 7,
            "visual__merger__weight": 3,
        }
        self.weights = {name.replace("__", "."): torch.nn.Parameter(torch.ones(size)) for name, size in sizes.items()}

    def named_parameters(self, *args, **kwargs):
        return iter(self.weights.items())

    def forward(self, attention_mask=None, pixel_values=None, pixel_values_videos=None):
        return None


class Model(list):
    """Embeds a text as its length and an image as its mean colour, and calls the network as a real model would."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__([SimpleNamespace(auto_model=Network())])

    def encode_document(self, inputs, batch_size, show_progress_bar, normalize_embeddings):
        vectors = []
        for item in inputs:
            item = {"text": item} if isinstance(item, str) else item
            pixels = torch.ones(64, 3) if "image" in item else None
            frames = torch.ones(256, 3) if "video" in item else None
            self[0].auto_model(attention_mask=torch.ones(1, 5), pixel_values=pixels, pixel_values_videos=frames)
            shown = np.asarray(item.get("image", item.get("video", np.zeros((1, 1, 1, 3))))).reshape(-1, 3)
            vectors.append([*(shown.mean(axis=0) / 255), len(item.get("text", "")) / 30, 0.1])
        vectors = np.array(vectors, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    encode_query = encode_document


@pytest.fixture(scope="module")
def story(gallery):
    return tell(Model(), "moemb-mini", gallery)


def test_every_question_can_be_answered_and_every_kind_is_asked(collection):
    modality = {entry.key: entry.modality for entry in collection.entries}
    assert len(modality) == len(collection.entries)
    kinds = {question.kind for question in collection.questions}
    assert kinds == {
        "text → image",
        "text → clip",
        "text → heading",
        "image → image",
        "image + text → image",
        "image → text",
        "text → text",
    }
    for question in collection.questions:
        assert question.relevant and {modality[key] for key in question.relevant} == {question.target}
        assert not question.relevant & question.exclude
    assert set(modality.values()) == {"image", "clip", "page", "text"}


def test_unseen_things_are_test_families_without_flags_and_variants(collection):
    asked = [question for question in collection.questions if question.kind == "image → image"]
    assert asked and all(question.unseen and question.label.startswith("thing u") for question in asked)
    (sweep,) = [sweep for sweep in collection.sweeps if sweep.title == "English name → picture, unseen concepts"]
    assert sorted(sweep.queries) == sorted(f"text/en/{name}" for name in UNSEEN)


def test_pictures_close_to_a_training_picture_are_left_out(collection):
    keys = {entry.key for entry in collection.entries}
    assert "image/1f34b" not in keys and "image/1f3bb" in keys
    assert not any(question.item.get("text") == "lemon fr" for question in collection.questions)


def test_equal_pictures_are_one_answer(collection):
    (sweep,) = [sweep for sweep in collection.sweeps if sweep.title == "English name → picture, unseen concepts"]
    rows = dict(zip(sweep.queries, sweep.relevant, strict=True))
    first, second = (f"text/en/{name}" for name in UNSEEN[-2:])
    assert rows[first] == rows[second] and len(rows[first]) == 2
    assert {sweep.pool[place] for place in rows[first]} == {f"image/{name}" for name in UNSEEN[-2:]}


def test_an_edited_picture_is_not_found_by_itself(collection):
    entries = {entry.key: entry for entry in collection.entries}
    (question,) = [question for question in collection.questions if question.kind == "image + text → image"]
    (own,) = question.exclude
    assert np.array_equal(entries[own].item["image"], question.item["image"])
    assert [entries[key].label for key in question.relevant] == ["waving hand: dark skin tone"]


def test_search_counts_ties_against_the_question(collection):
    question = collection.questions[0]
    vectors = np.ones((len(collection.entries), 2), dtype=np.float32)
    answer = Index(collection.entries, vectors).search(question, np.ones(2, dtype=np.float32))
    assert answer.rank == answer.pool > 1


def test_excluded_entries_and_other_languages_are_not_ranked(collection):
    index = Index(collection.entries, np.eye(len(collection.entries), 3, dtype=np.float32))
    for question in collection.questions:
        answer = index.search(question, np.ones(3, dtype=np.float32), results=10_000)
        found = {entry.key for entry, _ in answer.top}
        assert not found & question.exclude and len(found) == answer.pool
        if question.within:
            assert {entry.language for entry, _ in answer.top} <= question.within


def test_compute_is_counted_from_what_ran(story):
    items = sum(story.meter.items.values())
    assert story.meter.tokens == 5 * items
    assert story.meter.patches >= 64 * story.meter.items["image"] + 256 * story.meter.items["clip"]
    sizes = story.parameters
    assert (sizes.total, sizes.decoder, sizes.vision, sizes.merger) == (195, 25, 7, 3)
    assert sizes.flops(Meter(tokens=10, patches=8)) == 2 * (25 * 10 + 7 * 8 + 3 * 2)


def test_the_counting_ends_with_its_context():
    network, meter = Network(), Meter()
    with counting(network, meter):
        network(attention_mask=torch.ones(2, 3))
    network(attention_mask=torch.ones(2, 3))
    assert meter.tokens == 6
    assert count_parameters(network).patches_per_token == 4


class _Checker(HTMLParser):
    """Collects what a page refers to, and checks that elements are closed in order."""

    VOID = {"meta", "img", "source", "br", "link"}

    def __init__(self):
        super().__init__()
        self.stack, self.images, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "img":
            self.images.append(values)
        self.addresses += [values[name] for name in ("src", "srcset", "href") if name in values]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_page_is_whole_self_contained_and_described(story):
    page = render_page(story)
    checker = _Checker()
    checker.feed(page)
    assert checker.stack == []
    assert checker.images and all(image["alt"].strip() for image in checker.images)
    assert all(address.startswith("data:image/webp;base64,") for address in checker.addresses)
    assert not re.search(r'url\(|@import|(src|srcset|href)="(?!data:)', page)
    assert "$" not in page
    assert "elephant &lt;1&gt;" in page and "elephant <1>" not in page
    assert "Pictures by &lt;somebody&gt;" in page


def test_the_page_says_what_is_right_and_what_is_wrong(story):
    page = render_page(story)
    wrong = [answer for answer in story.answers if not any(answer.is_right(entry) for entry, _ in answer.top)]
    assert page.count('class="verdict good"') == sum(answer.rank == 1 for answer in story.answers)
    assert page.count("result right later") == len(wrong)


def test_the_console_says_the_same(story):
    text = "\n".join(console_lines(story))
    assert f"{len(story.answers)} questions: {sum(a.rank == 1 for a in story.answers)} right first" in text
    assert text.count("✗ the right answer is at") == sum(
        not any(answer.is_right(entry) for entry, _ in answer.top) for answer in story.answers
    )
    assert "English name → picture, unseen concepts" in text and "tokens" in text


def test_measurements_cover_all_items(story):
    rows = {row.name: row for row in story.measured}
    assert rows["English name → picture, unseen concepts"].queries == len(UNSEEN)
    assert rows["title → heading, unseen titles"].pool == 4
    assert rows["English name → clip, trained concepts"].pool == 1
    assert rows["name and motion → clip, unseen concepts"].pool == 10 * 8


def _arguments(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def test_the_command_writes_the_page(gallery, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus_gallery, "load_gallery", lambda folder: gallery)
    monkeypatch.setattr(quickstart_model, "load_model", lambda name, device: (Model(), name))
    output = tmp_path / "deep" / "page.html"
    assert run(_arguments("--output", str(output))) == 0
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"wrote {output}" in capsys.readouterr().out


def test_a_folder_as_output_is_refused_at_once(tmp_path):
    with pytest.raises(OutputError, match="is a folder"):
        run(_arguments("--output", str(tmp_path)))


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        run(_arguments("--output", str(tmp_path / "file" / "page.html")))


def test_a_model_of_another_kind_is_refused(gallery, tmp_path, monkeypatch):
    model = Model()
    model[0].auto_model.config.model_type = "bert"
    monkeypatch.setattr(corpus_gallery, "load_gallery", lambda folder: gallery)
    monkeypatch.setattr(quickstart_model, "load_model", lambda name, device: (model, name))
    with pytest.raises(QuickstartError, match="'bert' model"):
        run(_arguments("--model", "some/bert", "--output", str(tmp_path / "page.html")))


def test_a_missing_gallery_names_the_command(tmp_path):
    with pytest.raises(corpus_gallery.GalleryError, match="moemb data --gallery"):
        run(_arguments("--gallery", str(tmp_path / "nothing"), "--output", str(tmp_path / "page.html")))
    assert not (tmp_path / "page.html").exists()


def test_a_missing_checkpoint_names_the_folder_and_the_command(tmp_path):
    with pytest.raises(CheckpointMissingError, match=r"moemb train --config recipes/moemb-mini/contrastive\.yaml"):
        mini_repository(tmp_path / "nothing")


def test_a_clip_moves_and_a_picture_does_not():
    frame = np.zeros((64, 64, 3), np.uint8)
    assert data_uri([frame]).startswith("data:image/webp;base64,")
    assert len(data_uri([frame, frame + 200])) > len(data_uri([frame]))


@pytest.mark.parametrize("value, text", [(12_345_678, "12.3 M"), (2.5e12, "2.5 T"), (999, "999 ")])
def test_numbers_have_prefixes(value, text):
    assert si(value) == text

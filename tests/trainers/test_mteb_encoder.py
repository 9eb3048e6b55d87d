"""MoEMB in mteb: what a task's score is made of, on mteb's own task classes with a few items of ours."""

from types import SimpleNamespace

import datasets
import mteb
import numpy as np
import pytest
import torch
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.models import ModelMeta
from PIL import Image
from sentence_transformers import SentenceTransformer

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.model_card import count_parameters
from moemb.trainers.mteb_benchmarks import UnknownMTEBTaskError, run_mteb_tasks, select_mteb_tasks
from moemb.trainers.mteb_encoder import MoEMBEncoder, RememberingModel, content_digest, model_meta, task_prompts
from moemb.trainers.ranking_items import ItemPresenter
from moemb.trainers.repository import assemble_repository

from ..modeling_moemb.embedders import build
from ..processors import lean_processor
from .benchmark_trees import ColourModel


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "brown": (200, 100, 0)}


class ScoringModel(ColourModel):
    """The colour model with what mteb's wrapper asks of a Sentence Transformer."""

    model_card_data = SimpleNamespace(model_name=None, base_model=None, base_model_revision=None, base_models=None)
    max_seq_length, similarity_fn_name = 512, "cosine"

    def get_embedding_dimension(self):
        return 4

    get_sentence_embedding_dimension = get_embedding_dimension

    def similarity(self, first, second):
        return torch.as_tensor(first) @ torch.as_tensor(second).T


def local_task(name="VidoreDocVQARetrieval"):
    """A task of mteb whose data are four pages and three questions of ours."""
    base = type(mteb.get_task(name))

    class Local(base):
        def load_data(self, **_):
            pages = {"id": list(COLOURS), "image": [Image.new("RGB", (8, 8), colour) for colour in COLOURS.values()]}
            corpus = datasets.Dataset.from_dict(
                pages, features=datasets.Features({"id": datasets.Value("string"), "image": datasets.Image()})
            )
            queries = datasets.Dataset.from_dict({"id": ["1", "2", "3"], "text": ["red", "green", "red red"]})
            relevant = {"1": {"red": 1}, "2": {"green": 1}, "3": {"brown": 1}}
            split = RetrievalSplitData(corpus=corpus, queries=queries, relevant_docs=relevant, top_ranked=None)
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return Local()


def run(model, tmp_path, task=None, conventions=None, **settings):
    task = task or local_task()
    meta = ModelMeta.create_empty({"name": "moemb/colours", "revision": "r1", "modalities": ["text", "image"]})
    encoder = MoEMBEncoder(
        model, meta, conventions or EvaluationConventions(), tmp_path / "vectors", [task], **settings
    )
    done, refused = [], []
    run_mteb_tasks(encoder, [task], tmp_path / "mteb", 2, done.append, lambda *reason: refused.append(reason))
    return done, refused


def test_a_task_is_scored_and_repeated_without_encoding(tmp_path):
    model = ScoringModel()
    done, refused = run(model, tmp_path)
    assert refused == []
    (entry,) = done
    # the third question finds red first and brown second: 1 / log2(3)
    assert entry["value"] == pytest.approx((1 + 1 + 1 / np.log2(3)) / 3, abs=1e-4)
    assert (entry["name"], entry["metric"]) == ("VidoreDocVQARetrieval", "ndcg_at_5")
    assert entry["dataset"] == "mteb/docvqa_test_subsampled_beir" and len(entry["revision"]) == 40
    assert len(model.items) == 7
    assert list((tmp_path / "mteb").rglob("VidoreDocVQARetrieval.json"))
    again = ScoringModel()
    assert run(again, tmp_path)[0][0]["value"] == entry["value"] and again.items == []


def test_vectors_outlive_a_run_that_was_stopped(tmp_path):
    stopped, model = ScoringModel(fail_after=3), ScoringModel()
    with pytest.raises(KeyboardInterrupt):
        run(stopped, tmp_path)
    run(model, tmp_path)
    assert len(stopped.items) == 3 + 2 and len(model.items) == 2  # two batches of questions, one of two of pages


def test_instructions_come_from_the_task_and_candidates_follow_the_conventions(tmp_path):
    prompts = {"query": "Ask.", "document": "Page."}
    for number, (conventions, expected) in enumerate((
        ({}, {"Find a screenshot that relevant to the user's question.", "Page."}),
        ({"candidate_instruction": "none"}, {"Find a screenshot that relevant to the user's question.", ""}),
    )):  # fmt: skip
        model = ScoringModel(prompts)
        run(model, tmp_path / str(number), conventions=EvaluationConventions(**conventions))
        assert {batch.prompt for batch in model.batches} == expected
    model = ScoringModel(prompts)
    run(model, tmp_path / "user", conventions=EvaluationConventions(instruction_placement="user"))
    assert {batch.prompt for batch in model.batches} == {""}
    asked = [part["text"] for item in model.items for part in item if part["type"] == "text"]
    assert "Find a screenshot that relevant to the user's question. red" in asked


def test_prompts_of_tasks_without_an_instruction_are_the_models():
    presenter = ItemPresenter(EvaluationConventions(), {"query": "Ask.", "document": "Page."})
    tasks = [mteb.get_task("STS12"), mteb.get_task("VidoreDocVQARetrieval")]
    prompts = task_prompts(tasks, presenter)
    assert prompts["VidoreDocVQARetrieval-document"] == "Page."
    assert prompts["query"] == prompts["STS12"] == prompts["STS12-query"] == "Ask."


def test_a_data_set_that_cannot_be_had_is_reported_and_the_rest_goes_on(tmp_path):
    done, refused = run(ScoringModel(), tmp_path, task=mteb.get_task("VidoreArxivQARetrieval"))
    assert done == [] and refused[0][0] == "VidoreArxivQARetrieval"
    assert "mteb/arxivqa_test_subsampled_beir" in refused[0][1]


def test_what_is_in_an_item_is_its_identity():
    image = Image.new("RGB", (4, 4), (9, 9, 9))
    values = ["a", b"a", 1, 1.5, True, None, image, np.zeros((2, 2)), np.zeros(4), torch.zeros(2, dtype=torch.int64),
              ["a"], ["a", "b"], {"a": 1}, {"a": 2}, {"frames": [image]}]  # fmt: skip
    digests = [content_digest(value) for value in values]
    assert None not in digests and len(set(digests)) == len(values)
    assert content_digest(image.copy()) == content_digest(image)
    assert content_digest({"b": 1, "a": 2}) == content_digest({"a": 2, "b": 1})
    assert content_digest(object()) is content_digest({"a": object()}) is None


def test_items_that_cannot_be_looked_into_are_encoded_each_time(tmp_path):
    class Odd:
        pass

    model = RememberingModel(ScoringModel(), EvaluationConventions(), tmp_path)
    model._forward = lambda batch, prompt: np.ones((len(batch), 4), np.float32)
    for _ in range(2):
        assert model.encode([{"image": Odd()}, {"text": "a"}]).shape == (2, 4)
    assert model.encoded_items == 3
    assert model.encode([]).shape == (0, 4)


def test_unknown_names_are_named_with_the_nearest():
    with pytest.raises(UnknownMTEBTaskError, match=r"no benchmark 'ViDoRe\(v9\)'; did you mean 'ViDoRe"):
        select_mteb_tasks(["ViDoRe(v9)"], [])
    with pytest.raises(UnknownMTEBTaskError, match="no task 'STS122'; did you mean 'STS"):
        select_mteb_tasks([], ["STS122"])
    with pytest.raises(UnknownMTEBTaskError, match="name benchmarks or tasks"):
        select_mteb_tasks([], [])


def test_a_model_is_described_with_its_active_parameters(tmp_path, tiny_settings):
    processor = lean_processor()
    folder = assemble_repository(tmp_path / "tiny", model=build(tiny_settings, processor), processor=processor)
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    meta = model_meta(model, "tiny", "f" * 40, folder, {"top_k": 1})
    sizes = count_parameters(next(iter(model)).model.config)
    assert meta.n_active_parameters == sizes["active"] < meta.n_parameters == sizes["total"]
    assert meta.n_embedding_parameters == sizes["embedding_table"]
    assert (meta.name, meta.embed_dim, meta.max_tokens) == ("moemb/tiny", 64, 512)
    assert meta.modalities == ["text", "image", "video"] and meta.use_instructions
    assert meta.experiment_kwargs == {"adaptive_compute": '{"top_k": 1}'}
    encoder = MoEMBEncoder(model, meta, EvaluationConventions(), tmp_path / "v", [])
    result = mteb.evaluate(encoder, local_task(), cache=None, co2_tracker=False)
    plain = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    pages = [Image.new("RGB", (8, 8), colour) for colour in COLOURS.values()]
    scores = plain.encode(["red", "green", "red red"]) @ plain.encode(pages).T
    ranks = [int((row > row[right]).sum()) + 1 for row, right in zip(scores, (0, 1, 3), strict=True)]
    expected = np.mean([1 / np.log2(rank + 1) for rank in ranks])
    assert result.task_results[0].get_score() == pytest.approx(expected, abs=1e-4)

"""The model behind the search: the vectors users know, the dial's stops, and who waits for whom."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from moemb.trainers.quickstart_model import load_model
from moemb.trainers.rag_encoder import Encoder, SearchModelError, Turns, dial_stops
from moemb.trainers.rag_index import Indexer
from moemb.trainers.rag_search import Query, QueryError, Searcher
from moemb.trainers.rag_store import Store

from .rag_samples import BLUE, GREEN, RED, fill, pdf, picture


@pytest.fixture(scope="module")
def model():
    return load_model("moemb-mini")[0]


@pytest.fixture(scope="module")
def encoder(model):
    return Encoder(model, "moemb-mini")


@pytest.fixture(scope="module")
def searcher(encoder, tmp_path_factory):
    base = tmp_path_factory.mktemp("search")
    fill(base / "data")
    store = Store(base / "index", {"model": "m", "dimension": encoder.probe().shape[1]})
    Indexer(store, encoder, base / "data").update()
    yield Searcher(store, encoder)
    store.close()


@pytest.mark.parametrize("item", ["a red square", {"image": picture(RED)}, {"image": picture(BLUE), "text": "green"}])
@pytest.mark.parametrize("place", [0, 2, -1])
def test_a_query_has_the_vector_of_encode_query(model, encoder, item, place):
    stop = encoder.stops[place]
    (spent,), prepared = encoder.query(item, [stop])
    expected = model.encode_query([item], adaptive_compute=stop.budget, normalize_embeddings=True)[0]
    assert np.allclose(spent.vector, expected, atol=1e-6)
    assert spent.seconds > 0 and spent.runs >= 1 and prepared > 0


def test_documents_are_those_of_encode_document(model, encoder):
    items = ["one", {"image": picture(GREEN)}]
    expected = model.encode_document(items, normalize_embeddings=True)
    assert np.allclose(encoder.documents(items), expected, atol=1e-6)
    less = encoder.documents(items, {"top_k": 1})
    assert not np.allclose(less, expected, atol=1e-3)


def test_stops_go_down_in_flops(encoder):
    names = [stop.name for stop in encoder.stops]
    assert names[0] == "full compute" and len(names) == len(set(names)) == 5
    spent, _ = encoder.query({"image": picture(RED)}, encoder.stops)
    flops = [one.flops for one in spent]
    assert flops == sorted(flops, reverse=True) and len(set(flops)) == 5


def test_stops_follow_the_configuration(encoder):
    config = encoder.network.config
    budget = {"top_k": 3}
    shape = SimpleNamespace(text_config=config.text_config, adaptive_compute=budget)
    assert [stop.name for stop in dial_stops(shape)][:3] == ["full compute", "as calibrated", "3 of 4 experts"]
    text = SimpleNamespace(num_experts_per_tok=8, num_hidden_layers=40, layer_types=["linear_attention"] * 40)
    stops = dial_stops(SimpleNamespace(text_config=text, adaptive_compute=None))
    assert [stop.budget.get("top_k") for stop in stops] == [None, 6, 4, 2, 1]


def test_another_kind_of_model_is_refused():
    other = [SimpleNamespace(auto_model=SimpleNamespace(config=SimpleNamespace(model_type="bert")))]
    with pytest.raises(SearchModelError, match="'some/bert' is a 'bert' model"):
        Encoder(other, "some/bert")


def test_a_waiting_query_goes_before_waiting_documents():
    turns, order = Turns(), []
    running = threading.Event()

    def document(name, started=None):
        with turns.document():
            if started:
                started.set()
                time.sleep(0.2)
            order.append(name)

    def query():
        with turns.query():
            order.append("query")

    threads = [threading.Thread(target=document, args=("first", running))]
    threads[0].start()
    running.wait()
    for number in range(3):
        threads.append(threading.Thread(target=document, args=(f"later {number}",)))
        threads[-1].start()
    time.sleep(0.05)
    threads.append(threading.Thread(target=query))
    threads[-1].start()
    for thread in threads:
        thread.join(10)
    assert order[:2] == ["first", "query"] and len(order) == 5


def test_turns_are_given_back_after_an_error():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.query():
        1 / 0  # noqa: B018
    with turns.document():
        pass


def test_searching_by_everything(searcher, tmp_path):
    picture(RED).save(tmp_path / "mine.png")
    (tmp_path / "mine.pdf").write_bytes(pdf(["apples and pears", "plums"]))
    (tmp_path / "mine.txt").write_text("The harbour is frozen.")
    best = {
        Query(file=tmp_path / "mine.png"): ("red.png", ["image"]),
        Query(file=tmp_path / "mine.pdf", page=2): ("two.pdf", ["page"]),
        Query(file=tmp_path / "mine.txt"): ("notes.md", ["text"]),
        Query("The harbour is frozen."): ("notes.md", ["text"]),
    }
    for query, (path, kinds) in best.items():
        answer = searcher.search(query, 3, kinds)
        assert answer.hits[0].path == path and answer.pool == len(searcher.search(query, 99, kinds).hits)
    assert searcher.search(Query(file=tmp_path / "mine.pdf", page=2), 1, ["page"]).hits[0].page == 2
    both = searcher.search(Query("turn it green", tmp_path / "mine.png"), 9)
    assert both.hits[0].score != searcher.search(Query(file=tmp_path / "mine.png"), 9).hits[0].score


def test_more_like_this_leaves_the_thing_itself_out(searcher):
    first = searcher.search("a red square", 9, ["image", "clip"]).hits
    like = searcher.search(Query(like=first[0].id), 9, ["image", "clip"])
    assert {hit.id for hit in like.hits} == {hit.id for hit in first} - {first[0].id} and like.spent == []


def test_an_answer_compares_the_stops(searcher):
    plain = searcher.search("a red square", 9)
    assert [one.stop.name for one in plain.spent] == ["full compute"] and plain.agreement == [9]
    answer = searcher.search("a red square", 9, stop=2, compare=True)
    assert [one.stop.name for one in answer.spent][:2] == [searcher.encoder.stops[2].name, "full compute"]
    assert len(answer.spent) == 5 and answer.agreement_of == 9 and all(0 <= n <= 9 for n in answer.agreement)
    assert answer.agreement[1] == 9


@pytest.mark.parametrize(
    ("query", "options", "words"),
    [
        ("  ", {}, "type something"),
        (Query(file=None, like="0" * 32), {}, "no longer in the index"),
        ("a", {"stop": 9}, "stops 0 to 4, not 9"),
        ("a", {"modalities": ["sound"]}, "no modality 'sound'"),
        ("a", {"results": 0}, "results is 0"),
    ],
)
def test_what_cannot_be_asked(searcher, query, options, words):
    with pytest.raises(QueryError, match=words):
        searcher.search(query, **options)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.png", b"nothing", "no picture"),
        ("a.pdf", b"%PDF-1.4", "no PDF"),
        ("a.mp4", b"nothing", "cannot be embedded.*video"),
        ("a.txt", b"\0\0", "zero bytes"),
        ("a.zip", b"PK", "pictures, videos, PDFs and texts can be"),
    ],
)
def test_a_broken_file_is_a_clear_answer(searcher, tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(QueryError, match=words):
        searcher.search(Query(file=tmp_path / name))


def test_two_threads_searching_while_a_third_embeds(searcher):
    alone = [hit.id for hit in searcher.search("a red square", 9).hits]
    wrong, done = [], threading.Event()

    def embed():
        while not done.is_set():
            searcher.encoder.documents([{"image": Image.new("RGB", (64, 64))}] * 8)

    def look():
        for _ in range(5):
            if [hit.id for hit in searcher.search("a red square", 9).hits] != alone:
                wrong.append(1)

    embedding = threading.Thread(target=embed)
    embedding.start()
    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in lookers:
        thread.start()
    for thread in lookers:
        thread.join()
    done.set()
    embedding.join()
    assert not wrong

import datasets
import pytest

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.mrmr_tasks import TASKS, UnknownMRMRTaskError, read_mrmr_task, select_mrmr_tasks
from moemb.trainers.ranking_encoding import TaskEncoder
from moemb.trainers.ranking_items import ItemPresenter
from moemb.trainers.ranking_metrics import ranking_values
from moemb.trainers.ranking_task import BenchmarkDataError, TablePicture

from .benchmark_trees import BLUE, GREEN, RED, ColourModel, picture, table


COLUMNS = ("image", "image 1", "image 2", "image 3", "image 4", "vision")


def rows_table(path, rows):
    """Rows as the Hub has them: every picture column is there, most are empty."""
    full = []
    for row in rows:
        pictures = {name: {"bytes": picture(row[name]), "path": None} if name in row else None for name in COLUMNS}
        full.append({"modality": "text", "text": None} | {k: v for k, v in row.items() if k not in COLUMNS} | pictures)
    features = datasets.Features(
        {name: datasets.Value("string") for name in full[0] if name not in COLUMNS}
        | {name: datasets.Image(decode=False) for name in COLUMNS}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(full, features=features).to_parquet(path)


def make(root, name, queries, corpus, judged, dash="-", **more):
    rows_table(root / name / "query/test-00000-of-00001.parquet", queries)
    rows_table(root / name / "corpus/test-00000-of-00001.parquet", corpus)
    for config, rows in more.items():
        rows_table(root / name / f"{config}/test-00000-of-00001.parquet", rows)
    table(root / name / "qrels/test-00000-of-00001.parquet", [
        {f"query{dash}id": query, f"corpus{dash}id": document, "score": score} for query, document, score in judged
    ])  # fmt: skip


def shape(item):
    return [value if kind == "text" else f"[{value.column}]" for kind, value in item.parts]


def values(task, tmp_path):
    encoder = TaskEncoder(ColourModel(), ItemPresenter(EvaluationConventions(), {}), tmp_path / "v", progress=False)
    queries = encoder.encode(task.name, task.queries, "query")
    found, _ = ranking_values(task, queries, encoder.encode(task.name, list(task.pool.values()), "document"))
    return found[task.metric].tolist()


def test_the_five_tasks():
    assert list(TASKS) == ["knowledge", "theorem", "traffic", "design", "negation"]
    assert {name: task.metric for name, task in TASKS.items() if task.metric != "ndcg_linear@10"} == {
        "negation": "hit@1"
    }
    assert sorted(set(TASKS["knowledge"].disciplines.values())) == ["Art", "Humanities", "Medicine", "Science"]
    assert sorted(set(TASKS["theorem"].disciplines.values())) == ["Business", "Engineering", "Math", "Physics"]
    with pytest.raises(UnknownMRMRTaskError, match="'traffics'; did you mean 'traffic'"):
        select_mrmr_tasks(["traffics"])


def test_pictures_stand_where_the_text_names_them(tmp_path):
    queries = [
        {"id": "q1", "text": "see <image 2> and <image 1>, well", "image": RED, "image 1": RED, "image 2": BLUE},
        {"id": "q2", "text": "only <image 1>", "image": GREEN},
        {"id": "q3", "text": "none named", "image": RED},
        {"id": "q4", "text": None, "image": RED},
        {"id": "q5", "text": "an empty <image> place"},
        {"id": "q6", "text": "<image 1><image 2>", "image 1": RED, "image 2": BLUE, "image 3": GREEN},
    ]
    make(tmp_path, "design", queries, [{"id": "d", "text": "x"}], [(q["id"], "d", 1) for q in queries])
    shapes = [shape(item) for item in read_mrmr_task(TASKS["design"], tmp_path).queries]
    assert shapes == [
        ["see ", "[image 2]", " and ", "[image 1]", ", well"],
        ["only ", "[image]"],
        ["[image]", "none named"],
        ["[image]"],
        ["an empty <image> place"],
        ["[image 3]", "[image 1]", "[image 2]"],
    ]
    merged = [shape(item) for item in read_mrmr_task(TASKS["design"], tmp_path, "merged").queries[:3]]
    assert merged == [
        ["[image]", "see <image 2> and <image 1>, well"], ["[image]", "only <image 1>"], ["[image]", "none named"],
    ]  # fmt: skip


def test_a_row_with_nothing_in_it_is_named(tmp_path):
    make(tmp_path, "design", [{"id": "q", "text": "x"}], [{"id": "d", "text": "  "}], [("q", "d", 1)])
    with pytest.raises(BenchmarkDataError, match="row 0 of the table has neither a text nor a picture"):
        read_mrmr_task(TASKS["design"], tmp_path)


def test_knowledge_is_ranked_over_all_documents_and_reported_by_discipline(tmp_path):
    queries = [
        {"id": "a", "text": "red", "category": "Music"},
        {"id": "b", "text": "blue", "category": "Pharmacy"},
        {"id": "c", "text": "blue", "category": "Pharmacy"},
        {"id": "left out", "text": "green", "category": "Music"},
    ]
    corpus = [{"id": "1", "text": "red", "image": RED}, {"id": "2", "text": "blue green"}, {"id": "3", "text": "blue"}]
    judged = [("a", "1", 1), ("b", "2", 1), ("c", "3", 1), ("c", "1", 0)]
    make(tmp_path, "knowledge", queries, corpus, judged, dash="_", pin_p=[{"id": "1", "text": "green"}])
    task = read_mrmr_task(TASKS["knowledge"], tmp_path)
    assert list(task.pool) == ["1", "2", "3", "extra-0"] and task.ranking == "global"
    assert [row.group for row in task.rows] == ["Art", "Medicine", "Medicine"]
    assert isinstance(task.pool["1"].parts[0][1], TablePicture)
    assert task.queries[0].instruction == "Retrieve relevant documents that help answer the question."
    # b: document 3 is closer than the right one, which stands second: 1 / log2(3)
    assert values(task, tmp_path) == [1.0, pytest.approx(0.6309297), 1.0]


def test_negation_ranks_the_four_candidates_of_a_query(tmp_path):
    queries = [{"id": "7", "image": RED}, {"id": "8", "image": BLUE}]
    corpus = [
        {"id": f"{query}_{number}", "text": text}
        for query in ("7", "8")
        for number, text in enumerate(("red", "blue", "green", "green red"), 1)
    ]
    make(tmp_path, "negation", queries, corpus, [("7", "7_1", 1), ("8", "8_1", 1), ("8", "8_2", 0)])
    task = read_mrmr_task(TASKS["negation"], tmp_path)
    assert task.rows[0].candidates == ("7_1", "7_2", "7_3", "7_4")
    assert values(task, tmp_path) == [1.0, 0.0]


def test_a_query_without_its_candidates_is_named(tmp_path):
    make(tmp_path, "negation", [{"id": "7", "image": RED}], [{"id": "7_1", "text": "red"}], [("7", "7_1", 1)])
    with pytest.raises(BenchmarkDataError, match="query 7 has 1 candidates of the form 7_1"):
        read_mrmr_task(TASKS["negation"], tmp_path)


def test_the_first_queries_alone_can_be_read(tmp_path):
    queries = [{"id": str(number), "text": "red"} for number in range(3)]
    make(tmp_path, "traffic", queries, [{"id": "d", "text": "x"}], [(str(n), "d", 1) for n in range(3)])
    assert len(read_mrmr_task(TASKS["traffic"], tmp_path, limit=2).queries) == 2


def test_absent_data_say_how_to_get_them(tmp_path):
    with pytest.raises(BenchmarkDataError, match="MRMRbenchmark/traffic, query, test is neither here"):
        read_mrmr_task(TASKS["traffic"], tmp_path)

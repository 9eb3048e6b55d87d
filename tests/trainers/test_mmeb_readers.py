import datasets
import numpy as np
import pytest

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.mmeb_pages import page_file
from moemb.trainers.mmeb_questions import MVBENCH_SUBSETS
from moemb.trainers.mmeb_readers import read_mmeb_task
from moemb.trainers.mmeb_sources import MMEBSources
from moemb.trainers.mmeb_tasks import ALL_TASKS
from moemb.trainers.mmeb_video import video_labels
from moemb.trainers.ranking_encoding import TaskEncoder
from moemb.trainers.ranking_items import ItemPresenter
from moemb.trainers.ranking_metrics import ranking_values
from moemb.trainers.ranking_task import BenchmarkDataError, FrameFolder, TablePicture

from .benchmark_trees import (
    BLUE,
    DARK,
    GREEN,
    RED,
    ColourModel,
    beir,
    frames,
    image_row,
    image_tree,
    page_tree,
    picture,
    table,
)


def read(root, name, **sources):
    return read_mmeb_task(ALL_TASKS[name], MMEBSources(root, **sources))


def scores(task, tmp_path):
    """The value of each query under the colour model."""
    encoder = TaskEncoder(
        ColourModel(), ItemPresenter(EvaluationConventions(num_frames=8), {}), tmp_path / "vectors", progress=False
    )
    queries = encoder.encode(task.name, task.queries, "query")
    values, _ = ranking_values(task, queries, encoder.encode(task.name, list(task.pool.values()), "document"))
    return values[task.metric].tolist()


def texts(item):
    return [value for kind, value in item.parts if kind == "text"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_tree(tmp_path_factory.mktemp("mmeb"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return page_tree(tmp_path_factory.mktemp("pages"))


def test_a_picture_is_ranked_against_the_texts_of_its_row(images, tmp_path):
    task = read(images, "HatefulMemes")
    assert task.ranking == "local" and list(task.pool) == ["red", "green", "blue"]
    assert task.queries[0].instruction == "Represent the given image for classification"
    assert task.queries[0].parts[0] == ("image", images / "image-tasks/pics/red.png")
    assert task.rows[1].relevant == {"blue": 1.0} and task.rows[2].candidates == ("blue", "red")
    assert scores(task, tmp_path) == [1.0, 0.0, 1.0]


def test_a_text_is_ranked_against_the_pictures_of_its_row(images, tmp_path):
    task = read(images, "MSCOCO_t2i")
    assert [texts(query) for query in task.queries] == [["a red thing"], ["a blue thing"]]
    assert task.queries[0].instruction == "Find me an image that matches the given caption:"
    assert task.pool["pics/red.png"].instruction == "Represent the given image."
    assert scores(task, tmp_path) == [1.0, 0.0]


def test_candidates_may_be_pictures_with_captions(images, tmp_path):
    task = read(images, "WebQA")
    assert [texts(item) for item in task.pool.values()] == [["red red"], ["blue blue blue"]]
    assert scores(task, tmp_path) == [0.0]


def test_objects_of_one_picture_are_told_apart_by_their_captions(images, tmp_path):
    task = read(images, "RefCOCO-Matching")
    assert list(task.pool) == ["pics/dark.png:green", "pics/dark.png:red"]
    assert scores(task, tmp_path) == [1.0]


def test_only_the_first_rows_are_read_when_asked(images):
    assert len(read(images, "HatefulMemes", limit=2).queries) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([image_row("i", "", "pics/absent.png", ["a"])], "absent.png is in none of image-tasks"),
        ([image_row("i", "", "pics/a.png", [])], "'tgt_text' of row 0 is \\[\\]"),
        ([{"qry_inst": "i"}], "lacks the columns \\['qry_text'"),
    ],
)
def test_broken_image_rows_are_named(tmp_path, rows, message):
    picture(RED, tmp_path / "image-tasks/pics/a.png")
    table(tmp_path / "image-tasks/GQA/test-00000-of-00001.parquet", rows)
    with pytest.raises(BenchmarkDataError, match=message):
        read(tmp_path, "GQA")


def test_absent_tables_say_where_was_looked_and_how_to_get_them(tmp_path):
    with pytest.raises(
        BenchmarkDataError, match="ziyjiang/MMEB_Test_Instruct, GQA, test is neither here.*hf download"
    ):
        read(tmp_path, "GQA")


def test_pages_are_ranked_by_graded_relevance(pages, tmp_path):
    task = read(pages, "ViDoRe_docvqa")
    assert task.ranking == "global" and list(task.pool) == ["1", "2", "3", "4"]
    assert task.rows[0].relevant == {"2": 1.0, "3": 2.0}
    first, second = scores(task, tmp_path)
    discounted = 1 / np.log2(3)
    assert first == pytest.approx((1 + 2 * discounted) / (2 + discounted))
    assert second == 1.0


def test_a_language_of_the_queries_can_be_picked(pages):
    assert len(read(pages, "ViDoRe_esg_reports_v2_multilingual").queries) == 3
    assert [texts(query) for query in read(pages, "ViDoRe_esg_reports_v2").queries] == [["red"], ["blue"]]


def test_unpacked_pages_are_read_from_their_files(pages, tmp_path):
    name = "x" * 60 + ".jpg"
    before = read(pages, "VisRAG_ChartQA")
    assert isinstance(before.pool[name].parts[0][1], TablePicture)
    assert scores(before, tmp_path) == [pytest.approx(1 / np.log2(3))]  # in the table it is red: second of two
    short = page_file(name, ALL_TASKS["VisRAG_ChartQA"])
    assert len(short) == 50 + 1 + 8 + 4 and short.startswith("x" * 50 + "_")
    unpacked = picture(BLUE, pages / "visdoc-tasks/VisRAG_ChartQA" / short)
    after = read(pages, "VisRAG_ChartQA")
    assert after.pool[name].parts[0][1] == unpacked
    assert scores(after, tmp_path / "again") == [1.0]


def test_a_query_without_a_relevant_page_is_named(tmp_path):
    beir(tmp_path / "visdoc-tasks/ViDoSeek", ["red"], {"1": RED}, [(0, "1", 0)])
    with pytest.raises(BenchmarkDataError, match="query 0 .row 0. has no relevant page"):
        read(tmp_path, "ViDoSeek-doc")


VIDEOS = "video-tasks/frames"


def test_a_video_is_ranked_against_all_class_names(tmp_path):
    for name, colour in {"v1": RED, "v2": GREEN}.items():
        frames(tmp_path / VIDEOS / f"video_cls/UCF101/{name}", [colour] * 3)
    rows = [{"video_id": "v1", "pos_text": "red"}, {"video_id": "v2", "pos_text": "red"}]
    table(tmp_path / "video-tasks/UCF101/test-00000-of-00001.parquet", rows)
    labels = tmp_path / "labels.json"
    labels.write_text('{"UCF101": ["red", "green", "blue"]}')
    task = read(tmp_path, "UCF101", label_names=labels)
    assert task.ranking == "global" and list(task.pool) == ["red", "green", "blue"]
    assert scores(task, tmp_path) == [1.0, 0.0]
    with pytest.raises(BenchmarkDataError, match="set label_names to the file"):
        read(tmp_path, "UCF101")


def test_class_names_are_read_from_the_official_file_without_running_it(tmp_path):
    source = tmp_path / "video_classification_utils.py"
    source.write_text(
        "import nothing_of_that_name\nA = ['one', 'two', 'one']\nB = ['three']\n"
        "VIDEOCLS_LABEL_MAPPING = {'UCF101': A, 'Kinetics-700': B}\nraise SystemExit\n"
    )
    assert video_labels(ALL_TASKS["UCF101"], source) == ["one", "two"]
    assert video_labels(ALL_TASKS["K700"], source) == ["three"]
    with pytest.raises(BenchmarkDataError, match="gives no class names of 'HMDB51'"):
        video_labels(ALL_TASKS["HMDB51"], source)


def test_a_class_that_is_no_class_name_is_named(tmp_path):
    frames(tmp_path / VIDEOS / "video_cls/HMDB51/v", [RED])
    table(tmp_path / "video-tasks/HMDB51/test.parquet", [{"video_id": "v", "pos_text": "wave"}])
    labels = tmp_path / "labels.json"
    labels.write_text('{"HMDB51": ["smile"]}')
    with pytest.raises(BenchmarkDataError, match="the class 'wave' of row 0"):
        read(tmp_path, "HMDB51", label_names=labels)


def test_something_something_ranks_the_answers_of_the_row(tmp_path):
    frames(tmp_path / VIDEOS / "video_cls/SSv2/12", [BLUE] * 2)
    rows = [{"video_id": 12, "pos_text": "blue", "neg_text": ["red", "blue"]}]
    table(tmp_path / "video-tasks/SmthSmthV2/test.parquet", rows)
    task = read(tmp_path, "SmthSmthV2")
    assert task.rows[0].candidates == ("red", "blue") and scores(task, tmp_path) == [1.0]


@pytest.mark.parametrize(
    ("name", "folder", "rows"),
    [
        ("DiDeMo", "video_ret/DiDeMo", [("x/v1.mp4", "a red one"), ("x/v2.mp4", "a green one")]),
        ("MSR-VTT", "video_ret/MSR-VTT", [("v1", "a red one"), ("v2", "a green one")]),
        ("MSVD", "video_ret/MSVD", [("v1", ["a red one", "blue"]), ("v2", ["a green one", "blue"])]),
        ("VATEX", "video_ret/VATEX", [("v1", ["a red one", "blue"]), ("v2", ["a green one", "blue"])]),
        ("YouCook2", "video_ret/YouCook2", [("v1", "a red one"), ("v2", "a green one")]),
    ],
)
def test_a_caption_is_ranked_against_all_videos(tmp_path, name, folder, rows):
    columns = {"DiDeMo": "video caption", "VATEX": "videoID enCap", "YouCook2": "id sentence"}
    identity, caption = columns.get(name, "video_id caption").split()
    files = {"MSR-VTT": "video", "MSVD": "video", "YouCook2": "video_path"}
    made = [
        {identity: key, caption: text} | ({files[name]: f"{key}.mp4"} if name in files else {}) for key, text in rows
    ]
    place = {"MSR-VTT": "test_1k/test", "YouCook2": "val"}.get(name, "test")
    table(tmp_path / f"video-tasks/{name}/{place}.parquet", made)
    frames(tmp_path / VIDEOS / folder / "v1", [RED, RED])
    frames(tmp_path / VIDEOS / folder / "v2", [BLUE])  # asked for as green: a miss would need a greener one
    task = read(tmp_path, name)
    assert list(task.pool) == ["v1", "v2"] and task.ranking == "global"
    assert [texts(query) for query in task.queries] == [["a red one"], ["a green one"]]
    assert scores(task, tmp_path)[0] == 1.0


QUESTIONS = {
    "Video-MME": (
        {"question": "Which?", "videoID": "v", "options": ["A. red.", "B. blue."], "answer": "B"},
        "Which?\nA. red.\nB. blue.", {"A. red.": "red", "B. blue.": "blue"}, "B. blue.",
    ),
    "NExTQA": (
        {"question": "which", "video": 7, "answer": 1, "a0": "red", "a1": "blue", "a2": "c", "a3": "d", "a4": "e"},
        "which\nOptions:\n(A) red\n(B) blue\n(C) c\n(D) d\n(E) e",
        {"red": "red", "blue": "blue", "c": "c", "d": "d", "e": "e"}, "blue",
    ),
    "EgoSchema": (
        {"question": "Which?", "video_idx": "v", "option": ["A. red.", "B. blue."], "answer": "1"},
        "Which?A. red. B. blue.", {"A. red.": "red", "B. blue.": "blue"}, "B. blue.",
    ),
    "ActivityNetQA": (
        {"question": "is it blue", "video_name": "v", "answer": "no"},
        "is it blue? (A) yes; (B) no.", {"yes": "yes", "no": "no"}, "no",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_names_its_options_and_candidates_are_the_answers(tmp_path, name):
    row, asked, answers, right = QUESTIONS[name]
    folder = {"NExTQA": "7", "ActivityNetQA": "v_v"}.get(name, "v")
    frames(tmp_path / VIDEOS / f"video_qa/{name}" / folder, [BLUE] * 2, "{:04d}.jpeg")
    place = {"NExTQA": "MC/test", "EgoSchema": "Subset/test"}.get(name, "test")
    table(tmp_path / f"video-tasks/{name}/{place}.parquet", [row])
    task = read(tmp_path, name)
    assert texts(task.queries[0]) == [asked]
    assert {key: texts(item)[0] for key, item in task.pool.items()} == answers
    assert task.rows[0].relevant == {right: 1.0} and task.rows[0].candidates == tuple(answers)
    assert task.queries[0].instruction.endswith("Question:")


def test_mvbench_joins_its_twenty_parts(tmp_path):
    for number, subset in enumerate(MVBENCH_SUBSETS):
        rows = [{"question": "which", "video": f"{number}.mp4", "candidates": ["red", "blue"], "answer": "blue"}]
        table(tmp_path / f"video-tasks/MVBench/{subset}/train.parquet", rows)
        frames(tmp_path / VIDEOS / f"video_qa/MVBench/{subset}/{number}.mp4", [BLUE])
    task = read(tmp_path, "MVBench")
    assert len(task.queries) == 20 and list(task.pool) == ["(A) red", "(B) blue"]
    assert texts(task.queries[0]) == ["which\nOptions:\n(A) red\n(B) blue"]
    assert scores(task, tmp_path) == [1.0] * 20


def test_an_answer_that_is_no_option_is_named(tmp_path):
    frames(tmp_path / VIDEOS / "video_qa/Video-MME/v", [RED])
    row = QUESTIONS["Video-MME"][0] | {"answer": "D"}
    table(tmp_path / "video-tasks/Video-MME/test.parquet", [row])
    with pytest.raises(BenchmarkDataError, match="the answer 'D' of row 0 is none of its options"):
        read(tmp_path, "Video-MME")


def test_a_moment_is_ranked_against_the_clips_of_its_video(tmp_path):
    for video, clips in {"v1": (RED, BLUE), "v2": (GREEN, RED)}.items():
        root = tmp_path / VIDEOS / "video_mret/Charades_STA" / video
        frames(root / "query", [DARK] * 2)
        frames(root / "positive_1_2", [clips[0]] * 2)
        frames(root / "negative_1", [clips[1]] * 2)
    rows = [{"query": "red red", "video_path": "x/v1.mp4"}, {"query": "red red", "video_path": "v2.mp4"}]
    table(tmp_path / "video-tasks/Charades-STA/test.parquet", rows)
    task = read(tmp_path, "Charades-STA")
    assert task.rows[0].candidates == ("v1/negative_1", "v1/positive_1_2")
    assert [kind for kind, _ in task.queries[0].parts] == ["video", "text"]
    assert scores(task, tmp_path) == [1.0, 0.0]


def test_a_moment_without_a_right_clip_is_named(tmp_path):
    frames(tmp_path / VIDEOS / "video_mret/QVHighlight/v/negative", [RED])
    table(tmp_path / "video-tasks/QVHighlight/test.parquet", [{"query": "q", "video_path": "v.mp4"}])
    with pytest.raises(BenchmarkDataError, match="holds no clip 'positive...' beside others"):
        read(tmp_path, "QVHighlight")


def test_moment_seeker_asks_in_three_ways(tmp_path):
    root = tmp_path / VIDEOS / "video_mret/MomentSeeker"
    for name, colour in {"a_1": RED, "a_2": BLUE, "b_q": RED}.items():
        frames(root / "video_frames" / name, [colour] * 2)
    picture(RED, root / "query_p.jpg")
    clips = {"positive_frames": [{"output_path": "a/1.mp4"}], "negative_frames": [{"output_path": "a/2.mp4"}]}
    rows = [clips | {"query": text, "input_frames": given} for text, given in
            (("red", ""), ("that", "p.jpg"), ("that", "b/q.mp4"))]  # fmt: skip
    table(tmp_path / "video-tasks/MomentSeeker/test.parquet", rows)
    task = read(tmp_path, "MomentSeeker")
    assert [[kind for kind, _ in query.parts] for query in task.queries] == [
        ["text"], ["image", "text"], ["video", "text"],
    ]  # fmt: skip
    assert len({query.instruction for query in task.queries}) == 3
    assert scores(task, tmp_path) == [1.0, 1.0, 1.0]


def test_missing_frames_are_found_before_anything_is_encoded(tmp_path):
    rows = [{"video_id": "v9", "video": "v9.mp4", "caption": "red"}]
    table(tmp_path / "video-tasks/MSR-VTT/test_1k/test.parquet", rows)
    with pytest.raises(BenchmarkDataError, match="1 of 1 pictures or videos are missing: .*v9"):
        read(tmp_path, "MSR-VTT")


def test_frames_stand_in_the_order_of_their_numbers(tmp_path):
    frames(tmp_path, [RED] * 11)
    assert [path.name for path in FrameFolder(tmp_path).paths()][1:3] == ["frame_2.png", "frame_3.png"]


def test_tables_are_found_in_every_form_of_a_data_set(tmp_path):
    rows = [{"video_id": "v", "pos_text": "red", "neg_text": ["red", "blue"]}]
    frames(tmp_path / VIDEOS / "video_cls/SSv2/v", [RED])
    made = datasets.Dataset.from_list(rows)
    for write in (
        lambda: made.save_to_disk(tmp_path / "video-tasks/SmthSmthV2"),
        lambda: made.to_json(tmp_path / "video-tasks/data/SmthSmthV2/test.jsonl"),
        lambda: table(tmp_path / "SmthSmthV2/data/test-00000-of-00001.parquet", rows),
    ):
        for folder in ("video-tasks/SmthSmthV2", "video-tasks/data/SmthSmthV2", "SmthSmthV2"):
            if (tmp_path / folder).exists():
                (tmp_path / folder).rename(tmp_path / f"gone-{folder.replace('/', '-')}")
        write()
        assert read(tmp_path, "SmthSmthV2").rows[0].relevant == {"red": 1.0}

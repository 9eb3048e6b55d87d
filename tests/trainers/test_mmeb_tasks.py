from collections import Counter

import pytest

from moemb.trainers.evaluation_conventions import EvaluationConventions
from moemb.trainers.mmeb_readers import READERS
from moemb.trainers.mmeb_tasks import ALL_TASKS, LEADERBOARD, UnknownTaskError, select_tasks


LEADERBOARDS_WAY = EvaluationConventions()


def names(*wanted, **conventions):
    return [task.name for task in select_tasks(list(wanted), EvaluationConventions(**conventions))]


def test_the_leaderboard_has_78_tasks_in_its_groups():
    groups = Counter(ALL_TASKS[name].group for name in LEADERBOARD)
    assert sum(groups.values()) == 78
    assert groups == {
        "image-cls": 10, "image-qa": 10, "image-ret": 12, "image-vg": 4,
        "video-cls": 5, "video-qa": 5, "video-ret": 5, "video-mret": 3,
        "visdoc-vidore1": 10, "visdoc-vidore2": 4, "visdoc-visrag": 6, "visdoc-ood": 4,
    }  # fmt: skip
    assert Counter(ALL_TASKS[name].modality for name in LEADERBOARD) == {"image": 36, "video": 18, "visdoc": 24}


def test_what_is_ranked_and_scored():
    for task in ALL_TASKS.values():
        assert task.reader in READERS
        assert task.metric == ("ndcg_linear@5" if task.modality == "visdoc" else "hit@1")
    ranked_whole = {name for name in LEADERBOARD if ALL_TASKS[name].is_global and ALL_TASKS[name].modality == "video"}
    assert ranked_whole == {"K700", "HMDB51", "UCF101", "Breakfast", "DiDeMo", "MSR-VTT", "MSVD", "VATEX", "YouCook2"}


def test_the_leaderboard_has_the_repaired_versions():
    chosen = names()
    assert {"ViDoSeek-page-fixed", "MMLongBench-page-fixed", "MomentSeeker"} <= set(chosen)
    assert not {"ViDoSeek-page", "MMLongBench-page", "MomentSeeker_1k8", "ViDoRe_esg_reports_v2"} & set(chosen)
    assert ALL_TASKS["MomentSeeker"].expected_rows == 1602


def test_the_originals_take_their_places():
    chosen = names(dataset_variants="original")
    assert len(chosen) == 78
    assert {"ViDoSeek-page", "MMLongBench-page", "MomentSeeker_1k8"} <= set(chosen)
    assert not {"ViDoSeek-page-fixed", "MMLongBench-page-fixed", "MomentSeeker"} & set(chosen)
    assert "ViDoRe_esg_reports_v2_multilingual" in chosen


def test_tasks_groups_and_modalities_can_be_named():
    assert names("GQA", "GQA") == ["GQA"]
    assert len(names("image-vg")) == 4 and len(names("visdoc")) == 24
    assert names("ViDoRe_esg_reports_v2") == ["ViDoRe_esg_reports_v2"]
    assert names("video-mret", "ChartQA")[0] == "ChartQA"


def test_an_unknown_task_is_named_with_the_nearest():
    with pytest.raises(UnknownTaskError, match="'Chart-QA'; did you mean 'ChartQA'"):
        select_tasks(["Chart-QA"], LEADERBOARDS_WAY)

"""Six ways in which other code loses points on MMEB-V2: each is a setting, recorded with the model, with effect."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_moemb import MoEMBConfig
from moemb.trainers.evaluation_conventions import (
    POOLED_STATE,
    ConventionError,
    EvaluationConventions,
    conventions_of,
    default_conventions,
    record_conventions,
)
from moemb.trainers.ranking_items import ItemPresenter, SavedFrames, spaced_frames
from moemb.trainers.ranking_task import FrameFolder, TaskItem

from ..processors import lean_processor, qwen_processor
from .benchmark_trees import RED, ColourModel, frames


PROMPTS = {"query": "Ask.", "document": "Represent it."}
QUERY = TaskItem((("image", None), ("text", "a\n red  thing")), "Find it:")


def presenter(**conventions):
    return ItemPresenter(EvaluationConventions(**conventions), PROMPTS)


def test_1_the_pooled_state_is_the_one_after_the_final_norm(shared_model, stock_model):
    ids = torch.arange(2, 12)[None]
    ids[0, -1] = 299
    states = {}
    hook = stock_model.language_model.norm.register_forward_hook(
        lambda _, given, out: states.update(before=given[0], after=out)
    )
    with torch.no_grad():
        stock_model(input_ids=ids)
        pooled = shared_model(input_ids=ids).pooler_output
    hook.remove()
    after, before = (torch.nn.functional.normalize(states[name][:, -1], dim=-1) for name in ("after", "before"))
    ours = torch.nn.functional.normalize(pooled, dim=-1)
    assert torch.allclose(ours, after, atol=1e-5)
    assert (ours * before).sum() < 0.999  # the other state points elsewhere
    assert EvaluationConventions().pooled_state == POOLED_STATE
    with pytest.raises(ConventionError, match="pooled_state is 'before the final norm'"):
        conventions_of(ColourModel(evaluation={"pooled_state": "before the final norm"}))


def test_2_the_instruction_is_the_system_turn_or_stands_before_the_text():
    system, user = presenter(), presenter(instruction_placement="user")
    assert system.prompt(QUERY, "query") == "Find it:"
    assert system.texts(QUERY, "query")[1] == ("text", "a\n red  thing")
    assert user.prompt(QUERY, "query") == "Ask."
    assert user.texts(QUERY, "query")[1] == ("text", "Find it: a\n red  thing")
    assert user.texts(TaskItem((("image", None),), "Find it:"), "query") == [("image", None), ("text", "Find it:")]
    assert system.prompt(TaskItem((("text", "x"),)), "query") == "Ask."


@pytest.mark.parametrize(("choice", "prompt"), [("recorded", "Represent it."), ("task", "Find it:"), ("none", "")])
def test_3_candidates_have_the_models_prompt_the_tasks_instruction_or_none(choice, prompt):
    assert presenter(candidate_instruction=choice).prompt(QUERY, "document") == prompt
    assert presenter(candidate_instruction=choice).prompt(QUERY, "query") == "Find it:"


def test_4_a_video_is_one_video_of_so_many_frames(tmp_path):
    frames(tmp_path, [RED] * 20)
    clip = TaskItem((("video", FrameFolder(tmp_path)),))
    (video,) = presenter(num_frames=8, frames_fps=2.0).content(clip, "document")
    assert video["type"] == "video" and video["video"]["fps"] == 2.0
    # 0, 19/7, 2*19/7, ... rounded down: frames 1, 3, 6, 9, 11, 14, 17 and 20
    expected = [f"frame_{number}.png" for number in (1, 3, 6, 9, 11, 14, 17, 20)]
    assert [path.rpartition("/")[2] for path in video["video"]["frames"]] == expected
    pictures = presenter(num_frames=8, video_input="images").content(clip, "document")
    assert [part["type"] for part in pictures] == ["image"] * 8
    assert "fps" not in presenter().content(clip, "document")[0]["video"]


def test_4_a_video_file_gives_the_frames_that_would_have_been_saved():
    assert SavedFrames(saved=4, wanted=2).indices(10, 25.0).tolist() == [0, 7]  # of 0, 2, 5, 7 the first and the last
    assert SavedFrames(saved=4, wanted=8).indices(3, None).tolist() == [0, 1, 2]
    assert spaced_frames(5, 3).tolist() == [0, 2, 4]


# 5, the variants of data sets, is in test_mmeb_tasks.py.


def test_6_texts_are_read_as_they_are_or_with_single_spaces():
    assert presenter().texts(QUERY, "query")[1][1] == "a\n red  thing"
    assert presenter(whitespace="collapse").texts(QUERY, "query")[1][1] == "a red thing"


def test_6_short_clips_keep_their_frames_or_are_filled_up(tmp_path):
    frames(tmp_path, [RED] * 3)
    clip = FrameFolder(tmp_path)
    assert len(presenter(num_frames=8).frames(clip)) == 3
    padded = presenter(num_frames=8, pad_short_clips=True).frames(clip)
    assert len(padded) == 8 and len(set(padded)) == 3 and padded[-1] == padded[2]


def test_every_convention_changes_the_address_of_the_vectors_it_changes(tmp_path):
    frames(tmp_path, [RED] * 3)
    item = TaskItem((("video", FrameFolder(tmp_path)), ("text", "a  b")), "Do:")
    keys = {
        presenter(**changed).key(item, "document")
        for changed in ({}, {"candidate_instruction": "task"}, {"candidate_instruction": "none"},
                        {"candidate_instruction": "task", "instruction_placement": "user"}, {"whitespace": "collapse"})
    }  # fmt: skip
    assert len(keys) == 5


def test_a_model_that_records_nothing_follows_its_processor():
    mini, qwen = default_conventions(lean_processor()), default_conventions(qwen_processor())
    assert (mini.num_frames, mini.frames_fps) == (8, None)
    assert (qwen.num_frames, qwen.frames_fps) == (qwen_processor().video_processor.max_frames, 2.0)
    assert conventions_of(ColourModel()) == EvaluationConventions(num_frames=8)


def test_what_the_model_records_holds_and_a_run_may_override_it():
    model = ColourModel(evaluation={"num_frames": 16, "candidate_instruction": "task"})
    assert conventions_of(model).num_frames == 16
    changed = conventions_of(model, {"num_frames": 4})
    assert (changed.num_frames, changed.candidate_instruction) == (4, "task")


def test_recorded_conventions_survive_the_configuration(tmp_path, tiny_settings):
    MoEMBConfig(**tiny_settings, emb_token_id=299).save_pretrained(tmp_path)
    chosen = EvaluationConventions(num_frames=32, whitespace="collapse", frames_fps=1.0)
    record_conventions(tmp_path, chosen)
    loaded = MoEMBConfig.from_pretrained(tmp_path)
    assert loaded.evaluation == chosen.to_dict() and loaded.text_config.hidden_size == 64
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["evaluation"] == chosen.to_dict()
    holder = SimpleNamespace(model=SimpleNamespace(config=loaded), processor=lean_processor())
    assert conventions_of([holder]) == chosen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_frames": 0}, "num_frames is 0"),
        ({"frames_fps": -1.0}, "frames_fps is -1.0"),
        ({"instruction_placement": "end"}, "instruction_placement is 'end'; known are 'system', 'user'"),
        ({"pad_short_clips": "yes"}, "pad_short_clips is 'yes'"),
        ({"frames": 8}, "there is no convention 'frames'"),
    ],
)
def test_wrong_conventions_are_named(values, message):
    with pytest.raises(ConventionError, match=message):
        conventions_of(ColourModel(evaluation=values))


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(ConventionError, match="config.json"):
        record_conventions(tmp_path, EvaluationConventions())


def test_prompts_of_a_side_fall_back_to_the_default():
    named = ItemPresenter(EvaluationConventions(), {"default": "Both."}, "default")
    item = TaskItem((("text", "x"),))
    assert named.prompt(item, "query") == named.prompt(item, "document") == "Both."
    assert np.array_equal(spaced_frames(2, 9), [0, 1])

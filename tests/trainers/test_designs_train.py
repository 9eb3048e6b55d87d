"""Every design, router objective and conditioning trains by the one recipe: what should move moves, and is saved."""

import pytest
import torch
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBModel
from moemb.trainers.contrastive_trainer import ContrastiveTrainer
from moemb.trainers.convert import convert_checkpoint
from moemb.trainers.upcycling import Design

from .contrastive_runs import small_repository, state_of, trainer, write_data


DENSE = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 0}
DESIGNS = {
    "upcycled": Design("upcycled", granularity=2, replicas=2),
    "modality": Design("modality"),
}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory, tiny_settings):
    root = tmp_path_factory.mktemp("designs")
    native = small_repository(root / "native", tiny_settings)
    settings = tiny_settings | {"text_config": tiny_settings["text_config"] | DENSE, "feed_forward": "dense"}
    dense = small_repository(root / "dense", settings)
    made = {name: convert_checkpoint(dense, root / name, design=design) for name, design in DESIGNS.items()}
    return {"native": native, "dense": dense, **made}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def run(folder, repository, data, **settings) -> tuple[ContrastiveTrainer, set[str], set[str]]:
    """A short training: the trainer, the parameters that moved, and those that were to."""
    made = trainer(folder, repository, data, max_steps=3, save_strategy="no", **settings)
    before = state_of(made.backbone)
    wanted = {name for name, parameter in made.backbone.named_parameters() if parameter.requires_grad}
    made.train()
    after = state_of(made.backbone)
    return made, {name for name, value in before.items() if not torch.equal(value, after[name])}, wanted


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("design", "tuning"),
    [
        ("dense", "lora"),
        ("upcycled", "full"),
        pytest.param("dense", "full", marks=slow),
        pytest.param("upcycled", "lora", marks=slow),
        pytest.param("modality", "full", marks=slow),
        pytest.param("modality", "lora", marks=slow),
    ],
)
def test_a_design_trains_by_the_same_recipe(tmp_path, repositories, data, design, tuning):
    upcycled = design == "upcycled"
    settings = {"train_router": upcycled, "router_balance_weight": 1e-3 if upcycled else 0.0}
    settings |= {"lora_expert_rank": 2} if tuning == "lora" and design != "dense" else {}
    made, moved, wanted = run(tmp_path, repositories[design], data, tuning=tuning, **settings)
    # no item of these data is a video: nothing reaches that expert's part of the stacks, which move as wholes
    assert moved == wanted
    networks = {name for name in wanted if ".mlp." in name}
    assert networks and upcycled == any(".mlp.gate." in name for name in wanted)
    final = made.export_final()
    saved, info = MoEMBModel.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert saved.config.feed_forward == ("moe" if upcycled else design)
    vectors = SentenceTransformer(str(final), trust_remote_code=True, device="cpu").encode(["red", "blue 2"])
    assert vectors.shape == (2, 64) and abs(vectors[0] - vectors[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        ("id", "lora"),
        pytest.param("id", "full", marks=slow),
        pytest.param("instruction", "lora", marks=slow),
        pytest.param("instruction", "full", marks=slow),
    ],
)
def test_a_conditioning_is_trained_saved_and_used(tmp_path, repositories, data, kind, tuning):
    made, moved, wanted = run(
        tmp_path, repositories["native"], data, tuning=tuning, task_conditioning=kind, task_id_dropout=0.3,
        task_conditioning_dim=8,
    )  # fmt: skip
    assert {name for name in moved if "task_" in name} == {name for name in wanted if "task_" in name}
    assert sum("task_router" in name for name in moved) == 2 and any("task_conditioning" in name for name in moved)
    final = made.export_final()
    model = SentenceTransformer(str(final), trust_remote_code=True, device="cpu")
    assert model[0].model.config.task_conditioning["kind"] == kind
    if kind == "id":
        one, other = (model.encode("red", router_task=task) for task in ("texts", "captions"))
    else:
        one, other = (model.encode("red", prompt=text) for text in ("Find the picture.", "What?"))
    assert abs(one - other).max() > 1e-5
    model.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True, device="cpu")
    options = {"router_task": "texts"} if kind == "id" else {"prompt": "Find the picture."}
    assert (again.encode("red", **options) == one).all()


@pytest.mark.parametrize("tuning", [pytest.param("full", marks=slow), "lora"])
def test_every_objective_is_logged_and_state_survives(tmp_path, repositories, data, tuning):
    settings = {"router_balance_weight": 1e-3, "router_z_weight": 1e-3, "router_conflict_weight": 0.01}
    made, moved, wanted = run(tmp_path, repositories["native"], data, tuning=tuning, train_router=True, **settings)
    assert moved == wanted
    logged = set().union(*made.state.log_history)
    names = {"router_balance_loss", "router_z_loss", "router_conflict_loss", "expert_load_entropy"}
    assert names | {"expert_load_entropy_00", "expert_load_entropy_01"} <= logged
    (objectives,) = made.objectives
    assert objectives.conflict.average.abs().sum(1).gt(0).all()

"""The routers' losses in chunks, and on several processes, against the same losses on one plain forward pass."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers.losses import load_balancing_loss, router_z_loss
from moemb.trainers.objectives import RouterChunk
from moemb.trainers.router_objectives import (
    RouterObjectiveError,
    RouterObjectives,
    RouterSums,
    conflict_loss,
    expert_load_entropy,
)
from moemb.trainers.router_settings import RouterSettings, RouterTasks, condition_routers

from ..conftest import EMB_ID
from ..modeling_moemb.batches import collate, mixed_items
from ..processors import lean_processor


TASKS = ["images", "texts", "videos"]
NUMBERS = torch.tensor([1, 0, 0, 0, 2, 2, 1, 1])  # of the eight items
CHUNKS = ([0, 1, 2], [3], [4, 5, 6, 7])
GROUPS = {"router_conflict": "groups", "router_task_groups": {"images": "visual", "videos": "visual"}}
SETTINGS = {
    "balance": {"router_balance_weight": 0.3},
    "z": {"router_z_weight": 0.2},
    "conflict": {"router_conflict_weight": 0.7, **GROUPS},
    "conflict-cosine": {"router_conflict_weight": 0.7, "router_conflict_overlap": "cosine", **GROUPS},
    "all": {"router_balance_weight": 0.3, "router_z_weight": 0.2, "router_conflict_weight": 0.7, **GROUPS},
}


def contrast(vectors):
    """InfoNCE of the first half of the items against the second."""
    unit = F.normalize(vectors, dim=-1)
    return F.cross_entropy(5.0 * unit[:4] @ unit[4:].T, torch.arange(4))


def expected_conflict(logits, tasks, groups, overlap):
    """The definition, item by item and pair by pair."""
    total = 0.0
    for layer in logits:
        means = {}
        for task in range(3):
            means[task] = layer.softmax(-1)[tasks[len(layer)] == task].mean(0)
        pairs = [(a, b) for a in range(3) for b in range(a) if groups[a] != groups[b]]
        for a, b in pairs:
            if overlap == "min":
                total = total + torch.minimum(means[a], means[b]).sum() / len(pairs)
            else:
                total = total + F.cosine_similarity(means[a], means[b], dim=0) / len(pairs)
    return total / len(logits)


def plain_gradients(model, batch, settings):
    """Loss and gradients of one forward pass over the whole batch, by definitions that know of no chunks."""
    model.zero_grad()
    output = model(**batch, pooled_only=True, output_router_logits=True)
    logits, segment = output.router_logits, batch["attention_mask"].nonzero()[:, 0]
    tasks = {len(segment): NUMBERS[segment], 8: NUMBERS}
    loss = settings.get("router_balance_weight", 0) * load_balancing_loss(logits, 2)
    loss = loss + settings.get("router_z_weight", 0) * router_z_loss(logits)
    if "router_conflict_weight" in settings:
        overlap = settings.get("router_conflict_overlap", "min")
        groups = ["visual", "texts", "visual"]
        loss = loss + settings["router_conflict_weight"] * expected_conflict(logits, tasks, groups, overlap)
    total = contrast(output.pooler_output) + loss
    total.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chunk_of(model, items, rows, pooled_grad=None):
    batch = collate([items[row] for row in rows])
    output = model(**batch, pooled_only=True, output_router_logits=True)
    segment = batch["attention_mask"].nonzero()[:, 0]
    grad = None if pooled_grad is None else pooled_grad[list(rows)]
    return RouterChunk(output.router_logits, segment, NUMBERS[list(rows)], output.pooler_output, grad)


def cached_gradients(model, items, objectives, chunks=CHUNKS):
    """The two passes of a trainer: chunks without a graph, the loss, chunks with one."""
    model.zero_grad()
    objectives.begin_step()
    vectors = torch.empty(8, 64)
    with torch.no_grad():
        for rows in chunks:
            chunk = chunk_of(model, items, rows)
            vectors[rows] = chunk.pooled
            objectives.first_pass(chunk)
    objectives.reduce()
    vectors.requires_grad_()
    contrast(vectors).backward()
    total = 0.0
    for rows in chunks:
        chunk = chunk_of(model, items, rows, vectors.grad)
        loss = objectives.second_pass(chunk)
        total += loss.item()
        ((chunk.pooled * chunk.pooled_grad).sum() + loss).backward()
    objectives.end_step()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-2)
        assert (actual[name] - gradient).abs().max() <= 1e-5 * max(scale, 1.0), name


@pytest.mark.parametrize("name", SETTINGS)
def test_cached_equals_plain(tiny_model, name):
    items = mixed_items()
    objectives = RouterObjectives(tiny_model, RouterSettings(**SETTINGS[name]), TASKS)
    value, gradients = plain_gradients(tiny_model, collate(items), SETTINGS[name])
    chunked, actual = cached_gradients(tiny_model, items, objectives)
    assert chunked == pytest.approx(value, abs=1e-5)
    assert_same_gradients(actual, gradients)
    router = "language_model.layers.2.mlp.gate.weight"
    _, without = plain_gradients(tiny_model, collate(items), {})
    assert (gradients[router] - without[router]).abs().max() > 1e-4  # the objective does reach the router
    whole, one_chunk = cached_gradients(tiny_model, items, objectives, [list(range(8))])
    assert whole == pytest.approx(value, abs=1e-5)
    assert_same_gradients(one_chunk, gradients)


def test_losses_of_each_chunk_alone_are_something_else(tiny_model):
    """What the global statistics are for."""
    items, losses = mixed_items(), []
    with torch.no_grad():
        for rows in CHUNKS:
            losses.append(float(load_balancing_loss(chunk_of(tiny_model, items, rows).router_logits, 2)))
        whole = tiny_model(**collate(items), pooled_only=True, output_router_logits=True).router_logits
    assert abs(sum(losses) / 3 - float(load_balancing_loss(whole, 2))) > 1e-2


def test_values_at_even_and_collapsed_routing():
    def sums(logits):
        segment = torch.arange(len(logits))
        chunk = RouterChunk((logits,), segment, torch.zeros(len(logits), dtype=torch.long), None)
        return RouterSums.of(chunk, 2, 1)

    from moemb.trainers.router_objectives import balance_loss, z_loss

    even = torch.eye(8).roll(1, 0) + 2 * torch.eye(8)  # two experts per token, each expert twice
    assert float(balance_loss(sums(even * 50))) == pytest.approx(1.0, abs=1e-5)
    collapsed = torch.tensor([9.0, 9.0, *[-50.0] * 6]).repeat(8, 1)
    assert float(balance_loss(sums(collapsed))) == pytest.approx(8 / 2, abs=1e-5)
    assert float(z_loss(sums(torch.zeros(4, 8) + 3))) == pytest.approx((3 + torch.tensor(8.0).log().item()) ** 2)
    assert expert_load_entropy(sums(even).chosen)["expert_load_entropy_00"] == pytest.approx(1)
    assert expert_load_entropy(sums(collapsed).chosen)["expert_load_entropy"] == pytest.approx(1 / 3)


def test_conflict_is_the_weighted_overlap():
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [0, 9.0, 0]]) * 10  # tasks 1 and 2 route alike
    chunk = RouterChunk((logits,), torch.arange(3), torch.arange(3), None)
    weights = torch.tensor([[0.0, 3, 0], [3, 0, 1], [0, 1, 0]])
    assert float(conflict_loss(RouterSums.of(chunk, 1, 3), weights)) == pytest.approx((3 * 0 + 1 * 1) / 4, abs=1e-5)
    assert float(conflict_loss(RouterSums.of(chunk, 1, 3), torch.zeros(3, 3))) == 0


def test_conflict_by_gradient_follows_the_probe(tiny_model):
    """Moving averages of each task's gradient, weights from the steps before; the gradients are those of autograd."""
    items = mixed_items()
    objectives = RouterObjectives(tiny_model, RouterSettings(router_conflict_weight=0.5), TASKS)
    assert objectives.conflict.probe is tiny_model.language_model.norm.weight
    value, _ = cached_gradients(tiny_model, items, objectives)
    assert value == 0  # nothing is known of the first step
    output = tiny_model(**collate(items), pooled_only=True).pooler_output
    (arriving,) = torch.autograd.grad(contrast(output), output, retain_graph=True)
    expected = []
    for task in range(3):
        own = arriving * (task == NUMBERS)[:, None]
        expected.append(torch.autograd.grad(output, objectives.conflict.probe, own, retain_graph=True)[0])
    torch.testing.assert_close(objectives.conflict.average, 0.1 * torch.stack(expected), atol=1e-6, rtol=1e-4)
    cosine = F.cosine_similarity(expected[0], expected[1], dim=0)
    assert float(objectives.conflict.weights()[0, 1]) == pytest.approx(max(0.0, -float(cosine)), abs=1e-4)
    second, gradients = cached_gradients(tiny_model, items, objectives)
    if objectives.conflict.weights().fill_diagonal_(0).any():
        assert second > 0
    assert all(g.isfinite().all() for g in gradients.values())


def test_conflict_state_is_restored_and_belongs_to_its_tasks(tiny_model):
    items, settings = mixed_items(), RouterSettings(router_conflict_weight=0.5)
    first = RouterObjectives(tiny_model, settings, TASKS)
    cached_gradients(tiny_model, items, first)
    second = RouterObjectives(tiny_model, settings, TASKS)
    second.load_state_dict(first.state_dict())
    a, ga = cached_gradients(tiny_model, items, first)
    b, gb = cached_gradients(tiny_model, items, second)
    assert a == b and all(torch.equal(ga[name], gb[name]) for name in ga)
    other = RouterObjectives(tiny_model, settings, ["x", "y"])
    with pytest.raises(RouterObjectiveError, match=r"is of the data sets \['images', 'texts', 'videos'\]"):
        other.load_state_dict(first.state_dict())


def test_the_probe_is_the_adapter_of_the_last_mixer(tiny_model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model, LoraConfig(r=2, target_modules=["o_proj", "out_proj"]))
    objectives = RouterObjectives(model, RouterSettings(router_conflict_weight=0.5), TASKS)
    names = [name for name, p in model.named_parameters() if p is objectives.conflict.probe]
    assert len(names) == 1 and "layers.7.self_attn.o_proj.lora_B" in names[0]
    cached_gradients(model, mixed_items(), objectives)
    assert objectives.conflict.average.abs().sum() > 0


def test_metrics_name_every_objective_and_block(tiny_model):
    objectives = RouterObjectives(tiny_model, RouterSettings(**SETTINGS["all"]), TASKS)
    cached_gradients(tiny_model, mixed_items(), objectives)
    metrics = objectives.metrics()
    assert {"router_balance_loss", "router_z_loss", "router_conflict_loss", "expert_load_entropy"} < set(metrics)
    assert sum(name.startswith("expert_load_entropy_") for name in metrics) == 8
    assert all(0 <= value <= 1 for name, value in metrics.items() if "entropy" in name)


def test_what_is_off_is_not_computed(tiny_model):
    assert not RouterObjectives(tiny_model, RouterSettings(log_expert_load=False), TASKS).active
    logged = RouterObjectives(tiny_model, RouterSettings(), TASKS)
    assert logged.active
    items = mixed_items()
    value, gradients = cached_gradients(tiny_model, items, logged)
    assert value == 0
    assert_same_gradients(gradients, plain_gradients(tiny_model, collate(items), {})[1])


@pytest.mark.parametrize(
    ("settings", "tasks", "message"),
    [
        ({"router_conflict_weight": 1.0}, ["one"], "needs two or more data sets"),
        (
            {"router_conflict_weight": 1.0, **GROUPS},
            ["a", "b"],
            r"names \['images', 'videos'\], which are no data sets",
        ),
    ],
)
def test_what_cannot_work_is_refused(tiny_model, settings, tasks, message):
    with pytest.raises(RouterObjectiveError, match=message):
        RouterObjectives(tiny_model, RouterSettings(**settings), tasks)


def test_a_probe_must_be_trained(tiny_model):
    tiny_model.requires_grad_(False)
    with pytest.raises(RouterObjectiveError, match="needs LoRA on the mixers' output projections or a trained last"):
        RouterObjectives(tiny_model, RouterSettings(router_conflict_weight=1.0), TASKS)


def test_a_model_without_routers_has_no_objective(tiny_settings):
    text = {"num_experts": 1, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0}
    settings = tiny_settings | {"text_config": tiny_settings["text_config"] | text}
    model = MoEMBModel(MoEMBConfig(**settings, feed_forward="dense", emb_token_id=EMB_ID))
    assert not RouterObjectives(model, RouterSettings(), TASKS).active
    with pytest.raises(RouterObjectiveError, match="router_z_weight is 0.1, but this model has no learned router"):
        RouterObjectives(model, RouterSettings(router_z_weight=0.1), TASKS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router_z_weight": -1.0}, "router_z_weight=-1.0"),
        ({"router_conflict": "loss"}, "router_conflict='loss': use one of gradient, groups"),
        ({"router_conflict_overlap": "max"}, "router_conflict_overlap='max'"),
        ({"task_conditioning": "name"}, "task_conditioning='name': use one of none, id, instruction"),
        ({"router_task_groups": {"a": "b"}}, "router_task_groups has no effect with router_conflict 'gradient'"),
        ({"task_id_dropout": 1.0}, "task_id_dropout=1.0"),
        ({"task_conditioning_dim": 0}, "task_conditioning_dim=0"),
    ],
)
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RouterSettings(**values)


def test_conditioning_by_settings(tiny_model, tiny_settings):
    processor = lean_processor()
    condition_routers(tiny_model, processor, RouterSettings(), TASKS)
    assert tiny_model.config.task_conditioning is None
    condition_routers(tiny_model, processor, RouterSettings(task_conditioning="id"), TASKS)
    assert tiny_model.config.task_conditioning == {"kind": "id", "tasks": TASKS, "dim": 64}
    condition_routers(tiny_model, processor, RouterSettings(task_conditioning="id"), ["others"])  # it keeps its own
    assert "instruction_mask" not in processor.embedding
    with pytest.raises(ValueError, match="but the model has one by 'id'"):
        condition_routers(tiny_model, processor, RouterSettings(task_conditioning="instruction"), TASKS)
    other = MoEMBModel(MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID))
    condition_routers(other, processor, RouterSettings(task_conditioning="instruction"), TASKS)
    assert processor.embedding["instruction_mask"] is True and other.config.task_conditioning["kind"] == "instruction"


def test_task_numbers_and_their_dropout():
    tasks = RouterTasks({"tasks": ["b", "a"]}, ["a", "new", "b"], dropout=0.1)
    given = torch.randint(0, 3, (5000,))
    assert torch.equal(tasks(given), torch.tensor([1, 2, 0])[given])
    dropped = tasks(given, torch.Generator().manual_seed(0))
    known = given != 1
    assert (dropped[known] == 2).float().mean() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(dropped, tasks(given, torch.Generator().manual_seed(0)))


WORKER = """
import sys
import torch, torch.distributed as dist
from tests.trainers.test_router_objectives import *

rank, folder, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
saved = torch.load(f"{folder}/given.pt", weights_only=False)
model = MoEMBModel.from_pretrained(f"{folder}/model")
objectives = RouterObjectives(model, RouterSettings(**SETTINGS[name]), TASKS)
rows = [[0, 1, 2], [3]] if rank == 0 else [[4, 5, 6, 7]]
objectives.begin_step()
with torch.no_grad():
    for part in rows:
        objectives.first_pass(chunk_of(model, saved["items"], part))
objectives.reduce()
total = sum(objectives.second_pass(chunk_of(model, saved["items"], part)) for part in rows)
total.backward()
objectives.end_step()
gradients = {}
for key, parameter in model.named_parameters():
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    dist.all_reduce(gradient)
    gradients[key] = gradient / 2  # as DistributedDataParallel averages
if rank == 0:
    torch.save({"gradients": gradients, "metrics": objectives.metrics()}, f"{folder}/made.pt")
"""


@pytest.mark.slow
def test_two_processes_equal_one(tiny_model, tmp_path):
    items = mixed_items()
    torch.save({"items": items}, tmp_path / "given.pt")
    tiny_model.save_pretrained(tmp_path / "model")
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path), "all"],
            cwd=root,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=250)
        assert run.returncode == 0, errors
    made = torch.load(tmp_path / "made.pt")
    objectives = RouterObjectives(tiny_model, RouterSettings(**SETTINGS["all"]), TASKS)
    objectives.begin_step()
    with torch.no_grad():
        objectives.first_pass(chunk_of(tiny_model, items, list(range(8))))
    objectives.reduce()
    objectives.second_pass(chunk_of(tiny_model, items, list(range(8)))).backward()
    assert made["metrics"] == pytest.approx(objectives.metrics(), abs=1e-5)
    for name, parameter in tiny_model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(made["gradients"][name], expected, atol=1e-5, rtol=1e-4)

"""`method: adaptive` on a planted task: what is trained, what is not, what is recorded, stopped and written."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from transformers import set_seed

from modeling_moemb import MoEMBModel
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.gates_moemb import attach_gates, twin_null_experts
from moemb.trainers.adaptive_config import AdaptiveConfig
from moemb.trainers.adaptive_flops import estimate_of
from moemb.trainers.adaptive_monitor import GateCollapse
from moemb.trainers.adaptive_policy import Estimators, TrainingPolicy
from moemb.trainers.adaptive_strategies import Phase
from moemb.trainers.adaptive_trainer import AdaptiveTrainer
from moemb.trainers.planted import PlantedData, PlantedTask


GATES = {"keep": {"layer": 1, "width": 16}, "skip": {}, "null": {"experts": 16}}
TARGETS = {"keep": 0.4, "skip": 0.5, "null": 0.6}
DATA = {"corpus_sources": {"emoji": {}}}  # never read: the planted task stands in


def settings(folder, **changes):
    given = {
        "output_dir": str(folder), "gates": GATES, "targets": TARGETS, "max_steps": 4, "use_cpu": True,
        "weights_dtype": "float32", "learning_rate": 1e-2, "warmup_steps": 0, "logging_steps": 2, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no", "seed": 1, **DATA,
    }  # fmt: skip
    return AdaptiveConfig(**given | changes)


class Words:
    """Stands in for a processor, which a planted task has none of."""

    def save_pretrained(self, folder):
        (folder / "words.json").write_text("{}")


def trainer(folder, task=None, pairs=8, **changes):
    task = task or PlantedTask(0)
    args = settings(folder, **changes)
    set_seed(args.seed)
    return AdaptiveTrainer(copy.deepcopy(task.model), args, None, PlantedData(task, pairs))


@pytest.fixture(autouse=True)
def plain_checkpoints(monkeypatch):
    """Weights and configuration alone: the tokenizer of moemb-mini does not belong to these models."""
    from moemb.trainers import adaptive_trainer

    def write(folder, model, tokenizer, record):
        model.save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps(record))

    monkeypatch.setattr(adaptive_trainer, "write_checkpoint", write)


def logged(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["global", "joint", "alternating", "sequential"])
def test_only_the_gates_in_turn_are_trained(tmp_path, strategy):
    more = {"flops_removed": 0.2, "targets": {}} if strategy == "global" else {}
    run = trainer(tmp_path, strategy=strategy, alternate_every=1, max_steps=3, **more)
    states, step = [], run.training_step

    def watched(*args, **kwargs):
        states.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
        return step(*args, **kwargs)

    run.training_step = watched
    run.train()
    states.append(dict(run.model.named_parameters()))
    seen = {kind: [] for kind in GATES}
    for before, after in pairwise(states):
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        assert all(name.startswith("gates.") for name in moved)
        for kind in GATES:
            seen[kind].append(any(name.startswith(f"gates.{kind}.") for name in moved))
    one_by_one = {"keep": [True, False, False], "skip": [False, True, False], "null": [False, False, True]}
    expected = one_by_one if strategy in ("alternating", "sequential") else dict.fromkeys(GATES, [True] * 3)
    assert seen == expected


def test_every_parameter_of_the_gates_is_trained(tmp_path):
    run = trainer(
        tmp_path, gates={**GATES, "gradual": {}, "skip": {"router_top1": True}}, targets={**TARGETS, "gradual": 0.6}
    )
    before = {name: p.detach().clone() for name, p in run.model.gates.named_parameters()}
    run.train()
    still = [name for name, p in run.model.gates.named_parameters() if torch.equal(before[name], p)]
    assert still == []
    (entry,) = [entry for entry in logged(tmp_path) if entry["step"] == 4 and "loss" in entry]
    names = {
        "distill_loss", "contrast_loss", "keep_budget_loss", "skip_budget_loss", "null_budget_loss", "binarity_loss",
        "gradual_budget_loss", "cosine", "flops_removed", "keep_kept", "keep_hard", "skip_kept", "skip_hard",
        "null_kept", "soft_hard_gap", "hard_cosine", "hard_flops_removed", "recall_full", "recall_soft", "recall_hard",
    }  # fmt: skip
    assert names <= set(entry)


def test_the_backbone_learns_with_a_rate_of_its_own(tmp_path):
    run = trainer(tmp_path, backbone_learning_rate=1e-3, max_steps=2)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(before[name], p)}
    assert any(".experts." in name for name in moved) and any("linear_attn" in name for name in moved)
    assert not any(
        ".mlp.gate." in n or "shared_expert_gate" in n or n.startswith("visual") or "embed" in n for n in moved
    )


def test_a_killed_run_goes_on_bit_by_bit(tmp_path):
    whole = trainer(tmp_path / "whole", strategy="alternating", alternate_every=1)
    whole.train()
    halves = {"strategy": "alternating", "alternate_every": 1, "save_strategy": "steps", "save_steps": 2}
    first = trainer(tmp_path / "halves", max_minutes=1e-9, **halves)  # the time is up after the first step
    first.train()
    assert first.state.global_step == 1
    second = trainer(tmp_path / "halves", **halves)
    second.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-1"))
    assert second.state.global_step == 4
    for (name, one), two in zip(whole.model.gates.named_parameters(), second.model.gates.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_recomputed_blocks_give_the_same_gates(tmp_path):
    """Gradient checkpointing asks the policy again inside a block."""
    gates = {**GATES, "gradual": {}}
    given = {"gates": gates, "targets": {**TARGETS, "gradual": 0.7}, "max_steps": 2}
    runs = [trainer(tmp_path / str(c), gradient_checkpointing=c, **given) for c in (False, True)]
    for run in runs:
        run.train()
    for (name, one), two in zip(runs[0].model.gates.named_parameters(), runs[1].model.gates.parameters(), strict=True):
        assert (one - two).abs().max() <= 1e-5, name


def test_gates_stay_in_fp32_beside_a_backbone_in_bf16(tmp_path):
    run = trainer(tmp_path, weights_dtype="bfloat16", max_steps=2, learning_rate=1e-5)
    before = {name: p.detach().clone() for name, p in run.model.gates.named_parameters()}
    run.train()
    assert run.model.language_model.layers[0].mlp.gate.weight.dtype == torch.bfloat16
    for name, parameter in run.model.gates.named_parameters():
        assert parameter.dtype == torch.float32
        if name in ("keep.head.bias", "skip.bias", "null.bias"):  # a change that bf16 would lose
            assert 0 < (parameter - before[name]).abs().max() < 1e-4


@pytest.mark.parametrize("deployment", ["threshold", "fraction"])
def test_the_final_model_has_its_gates_at_work(tmp_path, deployment):
    run = trainer(tmp_path, keep_deployment=deployment)
    run.train()
    folder = run.export_final()
    model = MoEMBModel.from_pretrained(folder).eval()
    keep = {"threshold": 0.5} if deployment == "threshold" else {"keep": 0.4}
    expected = {
        "token_pruning": {"layer": 1, "score": "gate", **keep},
        "expert_skip": {"threshold": 0.5},
        "null_experts": {},
    }
    assert model.config.adaptive_compute == expected and set(model.config.gates) == set(GATES)
    batch = run.data.batch(0)
    with torch.no_grad():
        budget = {"adaptive_compute": expected}
        assert torch.equal(
            model(**batch.inputs).pooler_output, run.model.eval()(**batch.inputs, **budget).pooler_output
        )


def test_gates_are_shifted_to_the_flops_that_were_asked_for(tmp_path):
    run = trainer(tmp_path, strategy="global", targets={}, flops_removed=0.3, flops_scope="decoder", max_steps=6)
    run.train()
    record = json.loads((run.export_final() / "training.json").read_text())
    assert record["measured_flops_removed"] == pytest.approx(0.3, abs=0.02) and record["shift"] != 0
    batch = run._matching_batches()
    done = full = 0.0
    for one in batch:
        with torch.no_grad():
            output = run.model.eval()(**one.inputs, adaptive_compute=run.budget, pooled_only=True, output_compute=True)
        done += count_flops(run.model.config, output.compute).decoder
        full += estimate_of(run.model.config, one.inputs).full("decoder")
    assert 1 - done / full == pytest.approx(record["measured_flops_removed"], abs=1e-3)


@pytest.mark.parametrize("scope", ["total", "decoder"])
def test_the_estimate_of_flops_is_exact_for_hard_decisions(scope):
    """What a budget of FLOPs is about equals what removal executes."""
    task = PlantedTask(3)
    model = copy.deepcopy(task.model)
    attach_gates(model, {**GATES, "gradual": {}, "skip": {"blocks": [0, 2, 3]}})
    twin_null_experts(model, 0.1)
    with torch.no_grad():
        for name, parameter in model.gates.named_parameters():
            if "null" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    batch = PlantedData(task, 4).batch(0)
    kinds = ("keep", "gradual", "skip", "null")
    policy = TrainingPolicy(
        Phase((), (), kinds, 1.0), Estimators(), batch.inputs["input_ids"].numel(), torch.Generator()
    )
    budget = {
        "token_pruning": {"layer": 1, "threshold": 0.5, "score": "gate"},
        "gradual_pruning": {}, "expert_skip": {}, "null_experts": {},
    }  # fmt: skip
    given = {"adaptive_compute": budget, "pooled_only": True, "output_compute": True}
    with torch.no_grad():
        output = model(**batch.inputs, gate_policy=policy, **given)
        alone = model(**batch.inputs, **given)
        full = model(**batch.inputs, adaptive_compute={}, pooled_only=True, output_compute=True)
    assert torch.equal(output.pooler_output, alone.pooler_output)  # what is called deployed is what is deployed
    macs = {kind: getattr(model.gates, kind).macs for kind in kinds}
    account, estimate = policy.account(4, torch.device("cpu"), macs), estimate_of(model.config, batch.inputs)
    counted = [getattr(count_flops(model.config, run.compute), scope) for run in (output, full)]
    assert estimate.full(scope) == counted[1]
    removed = float(estimate.removed(account.mass, account.kept, account.gate_macs, scope))
    assert removed == pytest.approx(1 - counted[0] / counted[1], abs=1e-9) and 0.05 < removed < 1


def test_a_run_of_a_collapsed_gate_is_stopped(tmp_path):
    """A gradual gate that drops everything at once and does not find back: training does not go on."""
    run = trainer(
        tmp_path, gates={"gradual": {}}, targets={"gradual": 0.9}, learning_rate=1e-9, max_steps=60,
        collapse_window=5, collapse_after=5,
    )  # fmt: skip
    with torch.no_grad():
        run.model.gates.gradual.bias.fill_(5.0)
    with pytest.raises(GateCollapse, match="the gradual gate has collapsed: deployed it keeps 0.0000"):
        run.train()
    assert run.state.global_step < 20


@pytest.mark.parametrize("estimator", ["halting", "balance", "straight_through", "compact"])
def test_other_estimators_train(tmp_path, estimator):
    changes = {
        "halting": {"gates": {"gradual": {}}, "gradual_estimator": "halting", "targets": {}},
        "balance": {
            "gates": {"null": {"experts": 16}}, "null_estimator": "balance", "targets": {}, "null_balance_weight": 1.0,
        },
        "straight_through": {
            "gates": {"keep": GATES["keep"]}, "keep_estimator": "straight_through", "targets": {"keep": 0.4},
        },
        "compact": {"gates": {"keep": GATES["keep"]}, "compact": True, "targets": {"keep": 0.4}},
    }  # fmt: skip
    run = trainer(tmp_path, **changes[estimator])
    before = {name: p.detach().clone() for name, p in run.model.gates.named_parameters()}
    run.train()
    assert all(not torch.equal(before[name], p) for name, p in run.model.gates.named_parameters())
    (entry,) = [entry for entry in logged(tmp_path) if entry["step"] == 4 and "loss" in entry]
    assert {"halting": "ponder_loss", "balance": "null_balance_loss"}.get(estimator, "keep_budget_loss") in entry


WRONG = [
    ({"gates": {}}, "name the gates to train"),
    ({"strategy": "both"}, "strategy='both': use one of"),
    ({"targets": {"keep": 0.4}}, r"targets lacks \['skip', 'null'\]"),
    ({"targets": {**TARGETS, "keep": 1.0}}, r"give trained gates .* a share in \(0, 1\)"),
    ({"strategy": "global"}, "strategy 'global' has one budget"),
    ({"flops_removed": 1.5}, "flops_removed=1.5: use a share"),
    ({"weight_decay": 0.1}, "must be 0"),
    ({"corpus_sources": {}}, "name the data: either corpus_sources or train_datasets"),
    ({"keep_deployment": "fraction", "flops_removed": 0.3}, "match_flops shifts thresholds"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_shot_gates_find_what_may_be_dropped(tmp_path, seed):
    """At least 90 % of what the oracle gains over full compute."""
    task = PlantedTask(seed)
    share = task.settings.content / (task.settings.content + task.settings.distractors)
    run = trainer(
        tmp_path, task, pairs=16, gates={"keep": GATES["keep"]}, targets={"keep": share}, max_steps=200,
        learning_rate=3e-3, logging_steps=50, seed=seed,
    )  # fmt: skip
    run.train()
    model, batches = run.model.eval(), range(1 << 20, (1 << 20) + 4)
    oracle, gates, none = (task.reward(model, run.budget, batches, name) for name in ("oracle", "gates", "none"))
    print(f"oracle {oracle:.3f}, gates {gates:.3f}, none {none:.3f}")
    assert gates >= 0.9 * oracle and (gates - none) >= 0.9 * (oracle - none)

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from moemb.trainers.cached_gradients import Embedded, contrastive_step
from moemb.trainers.contrastive_loss import ContrastiveLoss

from .contrastive_runs import small_repository, trainer, write_data


class BalanceObjective:
    """A load-balancing loss over the whole batch, the plainest objective there is."""

    active = True

    def __init__(self, weight=0.5):
        self.weight, self.calls, self.tokens = weight, [], 0

    def begin_step(self):
        self.calls = ["begin"]
        self.counts, self.tokens, self.shares = None, 0, 0.0

    def first_pass(self, chunk):
        assert not chunk.pooled.requires_grad
        self.calls.append("first")
        logits = chunk.router_logits[0]
        assert len(logits) == len(chunk.segment)
        counts = F.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).float()
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += len(logits)

    def reduce(self):
        self.calls.append("reduce")

    def second_pass(self, chunk):
        self.calls.append("second")
        assert chunk.pooled.requires_grad and chunk.pooled_grad.shape == chunk.pooled.shape
        logits = chunk.router_logits[0]
        return self.weight * (self.counts / self.tokens * logits.softmax(-1).sum(0) / self.tokens).sum()

    def end_step(self):
        self.calls.append("end")

    def metrics(self):
        return {"balance": 1.0}

    def state_dict(self):
        return {"seen": self.tokens}

    def load_state_dict(self, state):
        self.tokens = state["seen"]


def plain_balance(logits, weight):
    """The same over all tokens at once."""
    share = F.one_hot(logits.argmax(-1), logits.shape[-1]).float().mean(0)
    return weight * (share * logits.softmax(-1).mean(0)).sum()


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_settings):
    folder = tmp_path_factory.mktemp("cached")
    repository = small_repository(folder / "model", tiny_settings)
    return trainer(folder / "run", repository, write_data(folder), tuning="full", train_router=True, train_vision=True)


def gradients(run):
    found = {name: p.grad for name, p in run.backbone.named_parameters() if p.grad is not None}
    for parameter in run.backbone.parameters():
        parameter.grad = None
    return found


def plain_gradients(run, batch, objective=None):
    """One backward through one call of the model, without anything of the code under test but the loss."""
    output = run.embed(run.model, batch, range(len(batch.items)))
    total = run.loss(output.vectors, batch).loss
    if objective is not None:
        total = total + plain_balance(output.router_logits[0], objective.weight)
    total.backward()
    return gradients(run)


@pytest.mark.parametrize("with_objective", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_gradients_are_the_plain_ones(run, with_objective, checkpointing):
    run.model.train()
    batch = next(iter(run.get_train_dataloader()))["batch"]
    objective = BalanceObjective() if with_objective else None
    run.objectives = [objective] if with_objective else []
    expected = plain_gradients(run, batch, objective)
    if checkpointing:
        run.model.gradient_checkpointing_enable({"use_reentrant": False})
    run.training_step(run.model, {"batch": batch})
    if checkpointing:
        run.backbone.gradient_checkpointing_disable()
    actual = gradients(run)
    chunks = run._sums.pop("chunks")[0]
    assert chunks >= 3 and actual.keys() == expected.keys()
    scale = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-5 * scale), name
    if with_objective:
        passes = ["first"] * int(chunks) + ["reduce"] + ["second"] * int(chunks)
        assert objective.calls == ["begin", *passes, "end"]
    run.objectives = []


def linear_embed(layer, dropout, calls, chunk):
    calls.append(torch.is_grad_enabled())
    states = F.dropout(layer(chunk), dropout)
    return Embedded(states, (), torch.arange(len(chunk)), torch.zeros(len(chunk), dtype=torch.long))


def squares(vectors):
    value = (vectors.sum(0) ** 2).sum()
    from moemb.trainers.contrastive_loss import LossOutput

    return LossOutput(value, value.detach(), {}, value.detach(), value.detach())


def test_the_second_pass_draws_the_numbers_of_the_first():
    layer = torch.nn.Linear(5, 7)
    rows = torch.randn(6, 5)
    torch.manual_seed(5)
    plain = torch.cat([F.dropout(layer(part), 0.5) for part in rows.split(2)])
    expected = torch.autograd.grad((plain.sum(0) ** 2).sum(), layer.weight)[0]
    after = torch.rand(1)
    torch.manual_seed(5)
    contrastive_step(rows.split(2), partial(linear_embed, layer, 0.5, []), squares, torch.Tensor.backward)
    assert torch.allclose(layer.weight.grad, expected, rtol=1e-5)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize(("parts", "idle", "expected"), [(1, 0, 1), (3, 0, 6), (1, 1, 4), (2, 3, 10)])
def test_how_often_the_model_is_called(parts, idle, expected):
    layer, calls = torch.nn.Linear(5, 7), []
    rows = torch.randn(6, 5)
    contrastive_step(
        rows.split(6 // parts), partial(linear_embed, layer, 0.0, calls), squares, torch.Tensor.backward, idle=idle
    )
    assert len(calls) == expected
    cached = layer.weight.grad.clone()
    layer.weight.grad = None
    squares(layer(rows)).loss.backward()
    assert torch.allclose(cached, layer.weight.grad, rtol=1e-5)


def test_gathering_is_off_outside_of_process_groups():
    assert not torch.distributed.is_initialized()
    assert ContrastiveLoss(1.0, gather=True).gather

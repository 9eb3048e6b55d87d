import copy

import pytest
import torch
from torch import nn

from moemb.trainers.optimizer import MasterAdamW


def model_and_optimizer(dtype=torch.bfloat16, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype)
    return model, MasterAdamW([{"params": model.parameters(), "weight_decay": 0.01}], lr=1e-2, **kwargs)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(model.weight.dtype)
        model(x).float().square().sum().backward()
        optimizer.clip_gradients(1.0)
        optimizer.step()


def test_in_float32_it_is_adamw():
    model, optimizer = model_and_optimizer(torch.float32)
    reference = copy.deepcopy(model)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.01)
    train(model, optimizer, 5)
    for step in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        reference(x).square().sum().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
    assert torch.allclose(model.weight, reference.weight, atol=1e-6)


def test_updates_smaller_than_bfloat16_resolution_add_up():
    model, optimizer = model_and_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    before = model.weight.clone()
    masters = optimizer.masters[0].clone()
    train(model, optimizer, 1)
    assert not torch.equal(optimizer.masters[0], masters)
    train(model, optimizer, 400, start=1)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, optimizer.masters[0].bfloat16())


def test_a_restored_state_continues_exactly(tmp_path):
    model, optimizer = model_and_optimizer(ema_decay=0.9)
    train(model, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    train(model, optimizer, 3, start=3)

    other, fresh = model_and_optimizer(ema_decay=0.9)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(other, fresh, 3, start=3)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(optimizer.ema[0], fresh.ema[0])


def test_averaged_weights_are_put_in_and_taken_out():
    model, optimizer = model_and_optimizer(ema_decay=0.99)
    train(model, optimizer, 10)
    trained = model.weight.clone()
    with optimizer.averaged_weights():
        assert torch.equal(model.weight, optimizer.ema[0].bfloat16())
        assert not torch.equal(model.weight, trained)
    assert torch.equal(model.weight, trained)


def test_a_state_of_another_model_is_refused():
    _, optimizer = model_and_optimizer()
    other = MasterAdamW([{"params": nn.Linear(4, 4).parameters()}], lr=1e-3)
    with pytest.raises(ValueError, match="--init_from"):
        other.load_state_dict(optimizer.state_dict())

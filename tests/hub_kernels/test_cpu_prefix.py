"""The whole model on the compiled kernels: shared prefixes do not change a bit."""

import copy

import pytest
import torch

from modeling_moemb import kernels_report, modeling_moemb, use_kernels

from ..modeling_moemb.batches import collate
from ..modeling_moemb.test_prefix import grouped_items
from .row_cases import assert_same_bits, threads


OPS = ("gated_delta_rule", "causal_conv", "varlen_attention", "linear", "experts")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request, shared_model, moemb_cpu, moemb_cpu_build):
    previous = use_kernels(moemb_cpu_build)
    active = {row.op for row in kernels_report() if row.source != "torch"}
    assert active.issuperset(OPS)
    yield copy.deepcopy(shared_model).to(request.param)
    use_kernels(previous)


def vectors(model, items, **settings) -> torch.Tensor:
    batch = collate(items)
    for name in ("pixel_values", "pixel_values_videos"):
        if name in batch:
            batch[name] = batch[name].to(model.dtype)
    with torch.no_grad():
        return model(**batch, pooled_only=True, **settings).pooler_output


@pytest.mark.parametrize("length", [16, 60, 64, 65, 150])
def test_a_vector_has_the_same_bits_alone_in_any_batch_and_shared(model, monkeypatch, length):
    packings, real = [], modeling_moemb.shared_packing
    monkeypatch.setattr(modeling_moemb, "shared_packing", lambda *given: packings.append(real(*given)) or packings[-1])
    items = grouped_items(length)
    shared = vectors(model, items)
    assert packings[0][0].prefix_of == (0, -1, 1, 0, 1, 0, 0, -1, 0)
    assert_same_bits(shared, vectors(model, items, share_prefixes=False))
    assert_same_bits(shared, torch.cat([vectors(model, [item]) for item in items]))
    fewer = [6, 0, 4, 2]
    assert_same_bits(shared[fewer], vectors(model, [items[item] for item in fewer]))
    with threads(2):
        assert_same_bits(shared, vectors(model, items))


def test_pruned_items_have_the_same_bits(model):
    items, settings = grouped_items(66), {"adaptive_compute": {"token_pruning": {"layer": 3, "keep": 0.5}, "top_k": 1}}
    expected = torch.cat([vectors(model, [item], **settings) for item in items])
    assert_same_bits(vectors(model, items, **settings), expected)


def test_kernels_that_hand_no_state_on_run_every_item_from_its_start(model, moemb_cpu, monkeypatch):
    """As the portable kernels: they take no states, and the prefixes are shared in all but the rule."""
    items, real = grouped_items(150), moemb_cpu.supports
    expected = vectors(model, items)
    asked = []

    def refusing(op, *tensors):
        asked.append((op, len(tensors)))
        return real(op, *tensors) and not (op == "gated_delta_rule" and len(tensors) > 6)

    monkeypatch.setattr(moemb_cpu, "supports", refusing)
    previous = use_kernels("off")
    use_kernels(previous)
    from modeling_moemb import kernels_moemb

    monkeypatch.setattr(kernels_moemb, "_choices", {})
    assert_same_bits(vectors(model, items), expected)
    assert ("gated_delta_rule", 10) in asked

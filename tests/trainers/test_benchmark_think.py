"""Think-then-embed, and the two ways to apply a policy that save nothing: each computes what it says it computes."""

import pytest
import torch

from modeling_moemb.routing_moemb import Routing, uniform_top_k
from moemb.trainers.benchmark_dial_timing import executed
from moemb.trainers.benchmark_dishonest import expert_loop, masking, zero_weights
from moemb.trainers.benchmark_models import build_pair, image_item, packed_batch, padded_batch, text_item
from moemb.trainers.benchmark_peers import agreement
from moemb.trainers.benchmark_think import OURS, STOCK, THINK, ThinkThenEmbed
from moemb.trainers.benchmark_timing import Protocol
from moemb.trainers.dial_policies import Policy, PolicyError, Prepared
from moemb.trainers.saliency import expert_blocks


@pytest.fixture(scope="module")
def model():
    return build_pair("tiny", "fp32").ours


@pytest.fixture(scope="module")
def items():
    generator = torch.Generator().manual_seed(0)
    return [image_item(8, 12, 7, generator), text_item(17, generator), image_item(4, 4, 3, generator)]


@pytest.fixture(scope="module")
def features(items):
    return packed_batch(items, torch.float32)


def vectors(model, features, policy: Prepared) -> torch.Tensor:
    with torch.no_grad(), executed(model, policy) as arguments:
        return model(**features, **arguments).pooler_output


def both(budget: dict, execution: str) -> list[Prepared]:
    return [Prepared("", Policy(budget, execution=name), budget) for name in ("removal", execution)]


# think-then-embed


@pytest.mark.parametrize("batch", [packed_batch, padded_batch])
def test_thoughts_are_embedded_as_in_one_pass(model, items, batch):
    """Whatever the padding: the cache must hold the item, its positions and every thought."""
    work = ThinkThenEmbed(model, batch(items, torch.float32), 5)
    sequences, found = work.think()
    assert sequences.shape == (3, max(len(item.ids) for item in items) - 1 + 5)
    assert agreement(found, work.embed_thoughts(sequences))["largest_difference"] <= 1e-5
    assert agreement(found, work.embed_alone())["largest_difference"] > 1e-3, "thoughts must change the vector"
    again, _ = work.think()
    assert torch.equal(again, sequences)
    for row, item in zip(sequences, items, strict=True):
        assert row[-len(item.ids) - 4 : -5].tolist() == item.ids[:-1]
        assert not set(row[-5:].tolist()) & set(work.special)


def test_tokens_are_the_greedy_ones(model, items):
    work = ThinkThenEmbed(model, packed_batch(items[1:2], torch.float32), 3)
    sequences, _ = work.think()
    ids = items[1].ids[:-1]
    table = model.get_input_embeddings().weight
    for _ in range(3):
        embeddings = table[torch.tensor([ids])]
        with torch.no_grad():  # our own model, without a cache; embeddings, as the last token is not `<emb>`
            state = model(inputs_embeds=embeddings, pooled_only=True, adaptive_compute={}).pooler_output[0]
        logits = state @ table.T
        logits[work.special] = -torch.inf
        ids = [*ids, int(logits.argmax())]
    assert sequences[0].tolist() == ids


def test_each_thought_costs_one_step(model, features):
    """Without a cache every thought would cost a pass over all that stands before it."""
    work, seen = ThinkThenEmbed(model, features, 4), []
    hook = work.stock.model.language_model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    work.think()
    hook.remove()
    assert seen == [work.prompt["input_ids"].shape[1], 1, 1, 1, 2]


def test_the_weights_are_shared(model, features):
    stock = ThinkThenEmbed(model, features, 1).stock
    ours = dict(model.named_parameters())
    for name, parameter in stock.model.named_parameters():
        assert parameter.data_ptr() == ours[name].data_ptr(), name
    assert stock.lm_head.weight.data_ptr() == ours["language_model.embed_tokens.weight"].data_ptr()


def test_it_is_timed_beside_embedding(model, features):
    found = ThinkThenEmbed(model, features, 3).measure(Protocol(rounds=1, shortest=1e-4))
    assert set(found["qps"]) == {OURS, STOCK, THINK} and found["backend"] in ("eager", "grouped_mm")
    assert found["check"]["least_cosine"] > 0.9999
    for name in (OURS, STOCK):
        assert found["slower"][name] == pytest.approx(found["qps"][name] / found["qps"][THINK])


# masking


@pytest.mark.parametrize(
    "budget",
    [{"top_k": 1}, {"modes": {"tau": 0.15, "min_experts_emb": 1}}, {"per_modality": {"image": 1}}],
    ids=["top-k", "modes", "per modality"],
)
def test_masked_experts_give_the_same_vectors_and_run_all_pairs(model, features, budget):
    removal, masked = both(budget, "masking")
    torch.testing.assert_close(
        vectors(model, features, masked), vectors(model, features, removal), rtol=1e-4, atol=1e-5
    )
    full = model(**features, adaptive_compute={}, pooled_only=True, output_compute=True).compute
    with torch.no_grad(), executed(model, masked) as arguments:
        record = model(**features, **arguments).compute
    assert torch.equal(record.expert_pairs, full.expert_pairs)
    less = model(**features, adaptive_compute=budget, pooled_only=True, output_compute=True).compute
    assert int(less.expert_pairs.sum()) < int(full.expert_pairs.sum())


def test_zero_weights_finds_reordered_and_missing_pairs():
    routing = Routing(torch.tensor([[3, 1, 0]]), torch.tensor([[0.2, 0.5, 0.3]]), 4)
    masked = zero_weights(routing, uniform_top_k(routing, 2))
    assert masked.expert_index is routing.expert_index
    torch.testing.assert_close(masked.weight, torch.tensor([[0.0, 0.625, 0.375]]))
    skipped = zero_weights(routing, routing.skip(torch.tensor([[True, False, True]])))
    torch.testing.assert_close(skipped.weight, torch.tensor([[0.0, 0.5, 0.0]]))


@pytest.mark.parametrize("score", ["beta", "uniform"])
def test_masked_tokens_stay_and_are_zero(model, features, score):
    budget = {"token_pruning": {"layer": 2, "keep": 0.5, "score": score}}
    removal, masked = both(budget, "masking")
    states = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: states.append(args[0].clone()))
        for layer in model.language_model.layers
    ]
    found = vectors(model, features, masked)
    for handle in handles:
        handle.remove()
    tokens = features["input_ids"].numel()
    assert [len(state) for state in states] == [tokens] * 4
    kept = model(**features, adaptive_compute=budget, pooled_only=True, output_compute=True).keep_mask[0]
    for block, state in enumerate(states):
        assert torch.equal((state == 0).all(1), ~kept if block >= 2 else torch.zeros_like(kept)), block
    full = vectors(model, features, Prepared("", Policy(), {}))
    assert (found - full).abs().max() > 1e-3 and (found - vectors(model, features, removal)).abs().max() > 1e-4


def test_masking_goes_and_refuses_what_it_cannot_do(model, features):
    before = vectors(model, features, Prepared("", Policy(), {}))
    with pytest.raises(RuntimeError), masking(model, {"top_k": 1}):
        raise RuntimeError
    assert torch.equal(vectors(model, features, Prepared("", Policy(), {})), before)
    with pytest.raises(PolicyError, match="execution 'masking' is not possible with random_k"):
        with masking(model, {"random_k": 1}):
            pytest.fail("it was masked")


# the loop


def test_the_loop_computes_the_same_one_expert_after_the_other(model, features):
    grouped, loop = both({"top_k": 1}, "loop")
    torch.testing.assert_close(vectors(model, features, loop), vectors(model, features, grouped), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError), expert_loop(model):
        assert {block.experts.backend for block in expert_blocks(model)} == {"loop"}
        raise RuntimeError
    assert {block.experts.backend for block in expert_blocks(model)} == {"grouped"}

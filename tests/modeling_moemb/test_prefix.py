"""Shared prefixes: computed once, and no vector shows it."""

import random
import sys
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from modeling_moemb import modeling_moemb, use_kernels
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.delta_rule_moemb import gated_delta_rule
from modeling_moemb.layout_moemb import PackedLayout
from modeling_moemb.prefix_moemb import SHORTEST, _most_saving, find_prefixes
from moemb.trainers.quickstart_model import mini_repository

from ..conftest import TEXT_IDS
from .batches import Item, collate, flatten, mixed_items
from .budgets import BUDGETS


@pytest.fixture(autouse=True)
def torch_path():
    previous = use_kernels("off")
    yield
    use_kernels(previous)


@pytest.fixture
def packings(monkeypatch):
    """What every forward pass shared: the packings, `None` where it shared nothing."""
    found, real = [], modeling_moemb.shared_packing

    def spy(packed, ids):
        result = real(packed, ids)
        found.append(None if result is None else result[0])
        return result

    monkeypatch.setattr(modeling_moemb, "shared_packing", spy)
    return found


def prefix(length: int, seed: int = 7) -> list[int]:
    return torch.randint(0, TEXT_IDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def after(instruction: list[int]) -> Item:
    return Item(ids=list(instruction))


def grouped_items(length: int) -> list[Item]:
    """Two groups among items that share nothing; media behind the instruction, and items that are nothing else."""
    one, two = prefix(length), prefix(80, seed=8)
    return [
        after(one).text(9).emb(),
        Item().text(5).emb(),
        after(two).text(70).emb(),
        after(one).image(4, 4).text(3).emb(),
        after(two).image(8, 8).emb(),
        after(one).emb(),
        after(one).text(130).video(2, 4, 4).emb(),
        Item().image(4, 4).text(20).emb(),
        after(one).emb(),
    ]


def vectors(model, items, collated=collate, **settings) -> torch.Tensor:
    with torch.no_grad():
        return model(**collated(items), pooled_only=True, **settings).pooler_output


@pytest.mark.parametrize("length", [SHORTEST, 60, 63, 64, 65, 128, 150])
def test_vectors_are_those_of_the_items_alone(shared_model, packings, length):
    items = grouped_items(length)
    shared = vectors(shared_model, items)
    assert packings[-1].prefix_of == (0, -1, 1, 0, 1, 0, 0, -1, 0)
    assert packings[-1].lengths[:2] == [length, 80] and packings[-1].lengths[2 + 5] == 1
    alone = torch.cat([vectors(shared_model, [item]) for item in items])
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)
    apart = vectors(shared_model, items, share_prefixes=False)
    torch.testing.assert_close(shared, apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "flat"])
def test_padding_does_not_matter(shared_model, packings, side):
    items = grouped_items(70)
    collated = flatten if side == "flat" else lambda items: collate(items, side)
    expected = vectors(shared_model, items, share_prefixes=False)
    torch.testing.assert_close(vectors(shared_model, items, collated), expected, atol=1e-5, rtol=1e-5)
    assert packings[-1] is not None


WHOLE_ITEM = ("attention", "random", "random_k", "tiered_top_k")


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets(shared_model, packings, name):
    items, budget = grouped_items(66), BUDGETS[name]
    settings = {"adaptive_compute": budget, "output_compute": True}
    with torch.no_grad():
        shared = shared_model(**collate(items), pooled_only=True, **settings)
        apart = shared_model(**collate(items), pooled_only=True, share_prefixes=False, **settings)
    assert bool(packings) != any(word in str(budget) for word in WHOLE_ITEM)
    torch.testing.assert_close(shared.pooler_output, apart.pooler_output, atol=1e-5, rtol=1e-5)
    assert torch.equal(shared.keep_mask, apart.keep_mask)


def test_flops_are_those_that_were_executed(shared_model, packings):
    """By counting those of a batch of the prefixes and of the items by hand."""
    items = [after(prefix(70)).text(5).emb(), after(prefix(70)).text(11).emb(), Item().text(20).emb()]
    records = []
    for settings in ({}, {"share_prefixes": False}):
        with torch.no_grad():
            output = shared_model(**collate(items), pooled_only=True, output_compute=True, **settings)
        records.append(output.compute)
    shared, apart = records
    assert shared.lengths == [[70, 6, 12, 21]] * 8 and apart.lengths == [[76, 82, 21]] * 8
    assert shared.skip_rate(2) == apart.skip_rate(2) == 0
    (less, full), config = (count_flops(shared_model.config, record) for record in records), shared_model.config
    text = config.text_config
    pair, saved = 4 * text.num_attention_heads * text.head_dim, 70 * 71 // 2
    # the last block, which attends for the pooled tokens alone, has as many pairs either way
    assert full.attention - less.attention == pair * saved
    assert (full.experts - less.experts) * (2 * 7 * 179 + 2 * 3) == full.experts * 2 * 7 * 70


def test_nothing_is_shared_when_states_of_tokens_are_asked_for(shared_model, packings):
    batch = collate(grouped_items(70))
    for settings in (
        {"pooled_only": False},
        {"output_hidden_states": True},
        {"output_router_logits": True},
        {"output_beta": True},
        {"packed_hidden": True},
        {"share_prefixes": False},
        {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]},
    ):
        with torch.no_grad():
            shared_model(**{**batch, "pooled_only": True, **settings})
    assert not packings


def test_training_shares_nothing(tiny_model, packings):
    batch = collate([after(prefix(70)).text(3).emb(), after(prefix(70)).text(4).emb()])
    tiny_model(**batch, pooled_only=True).pooler_output.sum().backward()
    assert tiny_model.get_input_embeddings().weight.grad.abs().sum() > 0
    with torch.no_grad():
        tiny_model.train()(**batch, pooled_only=True)
    assert not packings
    with torch.inference_mode():
        tiny_model.eval()(**batch, pooled_only=True)
    assert packings[0].lengths == [70, 4, 5]


@pytest.mark.parametrize(
    "items",
    [
        [after(prefix(90)).emb()],
        [after(prefix(SHORTEST - 1)).text(2).emb(), after(prefix(SHORTEST - 1)).text(3).emb()],
        [after(prefix(20)).text(150).emb(), after(prefix(20)).text(150).emb()],
        [Item().image(8, 8).text(40).emb(), Item().image(8, 8).text(40).emb()],
        mixed_items(),
    ],
    ids=["one item", "too short", "not worth it", "media first", "nothing in common"],
)
def test_nothing_is_shared_when_there_is_nothing_to_gain(shared_model, packings, items):
    vectors(shared_model, items)
    assert packings == [None]


def test_an_image_ends_a_prefix(shared_model, packings):
    head = after(prefix(40)).image(8, 8)
    items = [Item(list(head.ids), images=head.images, image_pixels=head.image_pixels).text(4).emb() for _ in range(3)]
    expected = vectors(shared_model, items, share_prefixes=False)
    torch.testing.assert_close(vectors(shared_model, items), expected, atol=1e-5, rtol=1e-5)
    assert packings[-1].lengths[0] == 41  # with the token that opens the image


def test_the_last_token_is_an_item_s_own(shared_model, packings):
    same = after(prefix(50)).emb()
    expected = vectors(shared_model, [same])
    torch.testing.assert_close(vectors(shared_model, [same] * 3), expected.expand(3, -1), atol=1e-5, rtol=1e-5)
    assert packings[-1].lengths == [50, 1, 1, 1]


def test_a_long_prefix_of_some_or_a_short_one_of_all():
    base = np.array(prefix(200))

    def heads(*shared: int) -> list[np.ndarray]:
        return [np.append(base[:length], 1000 + item) for item, length in enumerate(shared)]

    assert find_prefixes(heads(60, 60, 60, 60)) == [([0, 1, 2, 3], 60)]
    assert find_prefixes(heads(60, 200, 60, 200)) == [([1, 3], 200)]
    assert find_prefixes(heads(60, 90, 60, 90)) == [([0, 1, 2, 3], 60)]
    assert find_prefixes(heads(10, 10)) == []
    assert find_prefixes([]) == find_prefixes([base[:0], base[:0]]) == []


def test_the_choice_saves_most_of_whole_ranges_and_their_parts():
    generator = random.Random(0)
    for _ in range(500):
        common = [generator.choice([0, 1, 2, 3, 5, 8]) for _ in range(generator.randint(1, 9))]

        @cache
        def best(first: int, last: int, common=tuple(common)) -> int:
            if last - first < 2:
                return 0
            least = min(common[first : last - 1])
            ends = [first, *(i + 1 for i in range(first, last - 1) if common[i] == least), last]
            return max((last - first - 1) * least, sum(best(*part) for part in pairwise(ends)))

        ranges = _most_saving(common)
        assert sum((last - first - 1) * length for first, last, length in ranges) == best(0, len(common) + 1)
        assert all(min(common[first : last - 1]) == length for first, last, length in ranges)
        assert all(one[1] <= two[0] for one, two in pairwise(ranges))


def test_rule_from_states_is_the_rule_of_the_whole():
    lengths, cuts = [30, 64, 65, 200, 140], [10, 64, 1, 128, 100]
    key, value = torch.randn(2, sum(lengths), 2, 16), torch.randn(sum(lengths), 4, 24)
    scalars = -torch.rand(sum(lengths), 4), torch.rand(sum(lengths), 4)
    everything = (key[0], key[1], value, *scalars)
    cpu = torch.device("cpu")
    whole, behind = gated_delta_rule(*everything, PackedLayout(lengths, cpu), return_final_state=True)
    sizes = [size for cut, length in zip(cuts, lengths) for size in (cut, length - cut)]
    parts = [tensor.split(sizes) for tensor in everything]
    heads, tails = ([torch.cat(part[side::2]) for part in parts] for side in (0, 1))
    head, states = gated_delta_rule(*heads, PackedLayout(cuts, cpu), return_final_state=True)
    kept = [item for item, (cut, length) in enumerate(zip(cuts, lengths)) if length > cut]
    rest = PackedLayout([lengths[item] - cuts[item] for item in kept], cpu, kept)
    tail, final = gated_delta_rule(*tails, rest, initial_state=states, return_final_state=True)
    pieces = zip(head.split(sizes[::2]), tail.split(sizes[1::2]))
    joined = torch.cat([piece for pair in pieces for piece in pair])
    torch.testing.assert_close(joined, whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(final, behind[kept], atol=2e-6, rtol=1e-5)


def test_queries_of_the_processor_share_their_instruction(monkeypatch):
    """The template puts the instruction first: real queries begin with the same tokens."""
    settings = {"trust_remote_code": True, "device": "cpu", "model_kwargs": {"dtype": torch.float32}}
    embedder = SentenceTransformer(str(mini_repository()), **settings)
    code, found = sys.modules[type(embedder[0].model).__module__], []
    real = code.shared_packing
    monkeypatch.setattr(code, "shared_packing", lambda *given: found.append(real(*given)) or found[-1])
    instruction = (
        "Given a question that a visitor of our gallery asked, find the picture, clip or heading that answers best; "
        "prefer drawings of the thing itself over drawings that merely contain it, and treat plurals, variants of "
        "spelling and other languages as the same thing, whichever artist drew them and whatever colours they chose. "
    )
    queries = ["a red square", "what does a cat do at night?", "ein Haus am See"]
    together = embedder.encode(queries, prompt=instruction)
    assert found[0] is not None and found[0][0].prefix_of == (0, 0, 0)
    assert found[0][0].lengths[0] >= 60 and max(found[0][0].lengths[1:]) < 16
    alone = np.concatenate([embedder.encode([query], prompt=instruction) for query in queries])
    np.testing.assert_allclose(together, alone, atol=1e-5)

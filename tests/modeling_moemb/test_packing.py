"""Packing, multimodal positions against transformers' own numbering, compaction, and what is refused."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from modeling_moemb.layout_moemb import PackedLayout
from modeling_moemb.packing_moemb import IMAGE, VIDEO, pack_batch

from ..conftest import EMB_ID
from .batches import Item, collate, flatten, mixed_items


def pack(batch, **kwargs):
    grids = {IMAGE: batch.get("image_grid_thw"), VIDEO: batch.get("video_grid_thw")}
    return pack_batch(batch["mm_token_type_ids"], batch.get("attention_mask"), None, grids, 2, **kwargs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", range(5))
def test_positions_equal_transformers(stock_model, side, seed):
    torch.manual_seed(seed)
    items = []
    for _ in range(6):
        item = Item()
        for _ in range(int(torch.randint(1, 5, ()))):
            height, width, frames = (2 * int(torch.randint(1, 6, ())) for _ in range(3))
            match int(torch.randint(0, 3, ())):
                case 0:
                    item.text(height)
                case 1:
                    item.image(height, width)
                case 2:
                    item.video(frames // 2, height, width)
        items.append(item.emb())
    batch = collate(items, side)
    expected, _ = stock_model.get_rope_index(
        batch["input_ids"],
        batch["mm_token_type_ids"],
        batch.get("image_grid_thw"),
        batch.get("video_grid_thw"),
        batch["attention_mask"],
    )
    packed = pack(batch)
    assert torch.equal(packed.position_ids, expected.reshape(3, -1)[:, packed.source])


def test_layout_of_a_padded_batch():
    batch = collate([Item().text(2).emb(), Item().emb(), Item().text(3).emb()], "left")
    packed = pack(batch)
    assert packed.lengths == [3, 1, 4]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8] and packed.cu_seqlens.dtype == torch.int32
    assert packed.segment.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert packed.source.tolist() == [1, 2, 3, 7, 8, 9, 10, 11]


def test_unpack_restores_places_and_leaves_zero_elsewhere():
    batch = collate([Item().text(2).emb(), Item().text(4).emb()], "left")
    packed = pack(batch)
    rows = torch.randn(packed.num_tokens, 6)
    padded = packed.unpack(rows, 2, 5)
    alive = batch["attention_mask"].bool()
    assert torch.equal(padded[alive], rows)
    assert not padded[~alive].any()


def test_compact_keeps_order_positions_and_makes_new_lengths():
    packed = pack(collate(mixed_items()))
    keep = (packed.modality == 0) | (torch.rand(packed.num_tokens) < 0.5)
    smaller, index = packed.compact(keep)
    assert torch.equal(index, keep.nonzero().squeeze(1))
    assert torch.equal(smaller.position_ids, packed.position_ids[:, keep])
    assert torch.equal(smaller.source, packed.source[keep])
    assert smaller.cu_seqlens is not packed.cu_seqlens
    assert smaller.lengths == [int(keep[packed.segment == item].sum()) for item in range(packed.num_items)]
    assert smaller.cu_seqlens.diff().tolist() == smaller.lengths
    again, _ = smaller.compact(torch.ones(smaller.num_tokens, dtype=torch.bool))
    assert torch.equal(again.source, smaller.source)


def test_replicate_equals_packing_the_copies():
    items = mixed_items()[:5]
    counts = [3, 1, 2, 1, 4]
    packed = pack(collate(items))
    size = collate(items)["input_ids"].numel()
    wide, index = packed.replicate(counts, size)
    expected = pack(collate([item for item, count in zip(items, counts) for _ in range(count)]))
    assert wide.lengths == expected.lengths
    for name in ("cu_seqlens", "position_ids", "modality", "segment"):
        assert torch.equal(getattr(wide, name), getattr(expected, name)), name
    assert wide.cu_seqlens.dtype == packed.cu_seqlens.dtype
    assert torch.equal(wide.source % size, packed.source[index])
    assert len(set(wide.source.tolist())) == wide.num_tokens
    again, same = packed.replicate(1, size)
    assert torch.equal(again.source, packed.source) and torch.equal(same, torch.arange(packed.num_tokens))
    with pytest.raises(ValueError, match="at least 1"):
        packed.replicate([1, 0, 1, 1, 1], size)


def test_compact_refuses_to_empty_an_item_and_wrong_masks():
    packed = pack(collate([Item().text(2).emb(), Item().emb()]))
    keep = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match="item 1 would lose all its tokens"):
        packed.compact(keep)
    with pytest.raises(ValueError, match="bool tensor of shape"):
        packed.compact(keep.long())


def test_four_dimensional_masks_are_refused(tiny_model):
    batch = collate([Item().text(3).emb()])
    batch["attention_mask"] = torch.ones(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"must have shape \(batch, sequence\).*leak state"):
        tiny_model(**batch)


def test_packing_by_position_ids_alone_is_refused(tiny_model):
    batch = collate([Item().text(7).emb()])
    with pytest.raises(ValueError, match=r"item 0 restart inside the item.*cu_seq_lens_q"):
        tiny_model(**batch, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))


def test_an_empty_item_is_named(tiny_model):
    batch = collate([Item().text(3).emb(), Item().text(3).emb()])
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="item 1 of the batch has no tokens"):
        tiny_model(**batch)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [([0, 3], "rise from 0"), ([1, 8], "rise from 0"), ([0, 5, 4, 8], "rise from 0"), ([0, 4, 4, 8], "item 1")],
)
def test_wrong_boundaries_are_refused(tiny_model, boundaries, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(
            input_ids=torch.tensor([[1, 2, 3, 299, 1, 2, 3, 299]]),
            cu_seq_lens_q=torch.tensor(boundaries, dtype=torch.int32),
        )


def test_boundaries_exclude_several_rows_and_padding(tiny_model):
    ids = torch.tensor([[1, 2, 299]])
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="one row"):
        tiny_model(input_ids=ids.repeat(2, 1), cu_seq_lens_q=cu_seqlens)
    with pytest.raises(ValueError, match="without padding"):
        tiny_model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1]]), cu_seq_lens_q=cu_seqlens)


def test_media_tokens_must_match_their_grids(tiny_model):
    batch = collate([Item().text(1).emb(), Item().image(8, 8).emb()])
    wrong = dict(batch, image_grid_thw=torch.tensor([[1, 4, 16], [1, 4, 4]]))
    with pytest.raises(ValueError, match="1 runs of image tokens but `image_grid_thw` describes 2"):
        tiny_model(**wrong)
    wrong = dict(batch, image_grid_thw=torch.tensor([[1, 4, 4]]))
    with pytest.raises(ValueError, match=r"image 0 \(item 1\) has 16 tokens but its grid \[1, 4, 4\] gives 4"):
        tiny_model(**wrong)
    missing = {key: value for key, value in batch.items() if key not in ("image_grid_thw", "pixel_values")}
    with pytest.raises(ValueError, match="item 1 has image tokens but no `image_grid_thw`"):
        tiny_model(**missing)
    with pytest.raises(ValueError, match="without its pixel values"):
        tiny_model(**{key: value for key, value in batch.items() if key != "pixel_values"})


def test_flattened_inputs_equal_padded_ones(tiny_model):
    items = mixed_items()
    with torch.no_grad():
        padded = tiny_model(**collate(items)).pooler_output
        flat = tiny_model(**flatten(items))
    torch.testing.assert_close(flat.pooler_output, padded, atol=1e-5, rtol=0)
    assert flat.last_hidden_state.shape[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.tensor([1, EMB_ID])}, r"shape \(batch, sequence\).* got \(2,\)"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "at least one item"),
        ({"input_ids": torch.tensor([[1, EMB_ID], [300, EMB_ID]])}, "item 1 holds the token id 300, outside"),
        ({"input_ids": torch.tensor([[-1, EMB_ID]])}, "item 0 holds the token id -1, outside"),
        ({"mm_token_type_ids": torch.zeros(2, 1, dtype=torch.long)}, r"has shape \(2, 1\) but the inputs \(1, 2\)"),
        ({"mm_token_type_ids": torch.tensor([[3, 0]])}, r"0 \(text\), 1 \(image\) or 2 \(video\)"),
        ({"position_ids": torch.arange(3)[None]}, r"batch 1 and sequence 2, got \(1, 3\)"),
        ({"position_ids": torch.zeros(1, 2, dtype=torch.long)}, "item 0 restart inside the item"),
        ({"cu_seq_lens_q": torch.tensor([[0, 2]])}, r"shape \(items \+ 1,\)"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 2.0])}, "must be integers"),
        ({"cu_seq_lens_k": torch.tensor([0, 2])}, "needs `cu_seq_lens_q`"),
        ({"pixel_values": torch.zeros(4, 384)}, "describes 0 patches but 4 were passed"),
        ({"output_attentions": True}, "never formed"),
    ],
)
def test_wrong_inputs_are_named(tiny_model, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**{"input_ids": torch.tensor([[1, EMB_ID]]), **changes})


def test_too_few_patches_are_named(tiny_model):
    batch = collate([Item().image(4, 4).emb(), Item().image(8, 4).emb()])
    batch["pixel_values"] = batch["pixel_values"][:-4]
    with pytest.raises(ValueError, match="`image_grid_thw` describes 48 patches but 44 were passed"):
        tiny_model(**batch)


def test_integer_widths_do_not_matter(tiny_model):
    batch = collate(mixed_items())
    with torch.no_grad():
        expected = tiny_model(**batch).pooler_output
        short = {key: value if value.is_floating_point() else value.int() for key, value in batch.items()}
        assert torch.equal(tiny_model(**short).pooler_output, expected)


def test_the_flattening_collator_of_transformers_is_understood(tiny_model):
    texts = [[1, 2, 3, EMB_ID], [EMB_ID], [4, EMB_ID]]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collator([{"input_ids": ids} for ids in texts])
    del batch["labels"]
    with torch.no_grad():
        expected = torch.cat([tiny_model(torch.tensor([ids])).pooler_output for ids in texts])
        assert (tiny_model(**batch).pooler_output - expected).abs().max() <= 1e-5


def test_a_packing_moves_to_another_device():
    packed = pack_batch(torch.zeros(2, 5, dtype=torch.long), None, None, {}, 2)
    layout = PackedLayout(packed.lengths, torch.device("cpu"))
    assert packed.to("cpu") is packed and layout.to("cpu") is layout
    moved = packed.to("meta")
    assert moved.lengths == packed.lengths
    assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
    assert layout.to("meta").device.type == "meta" and layout.to("meta") is layout.to(torch.device("meta"))
    assert layout.to("meta").causal_groups[0][0].is_meta


def test_items_of_one_chunk_are_laid_out_apart_from_longer_ones():
    layout = PackedLayout([60, 200, 64, 3], torch.device("cpu"))
    assert [(chunk.size, chunk.active) for chunk in layout.chunks] == [(8, [1]), (64, [2]), (64, [1, 1, 1, 1])]

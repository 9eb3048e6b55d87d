"""Conditioned routers: nothing changes at the start, and what is added is `U e` of each item's task afterwards."""

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb import MoEMBConfig, MoEMBModel

from ..conftest import EMB_ID
from ..processors import lean_processor, qwen_processor
from .batches import collate, mixed_items
from .embedders import build


TASKS = ["retrieval", "classification", "vqa"]
ID = {"kind": "id", "tasks": TASKS, "dim": 12}
INSTRUCTION = {"kind": "instruction", "dim": 12}


def marked(batch):
    """The batch with the first three tokens of every item but the first as its instruction."""
    mask = torch.zeros_like(batch["input_ids"])
    mask[1:, :3] = batch["attention_mask"][1:, :3]
    return batch | {"instruction_mask": mask}


def vectors(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **kwargs).pooler_output


def trained(model):
    """As after training: `U` is not zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.mlp.task_router.weight.normal_(std=0.8)
        for parameter in model.task_conditioning.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("settings", [ID, INSTRUCTION], ids=["id", "instruction"])
def test_a_fresh_conditioning_changes_no_bit(tiny_model, settings):
    batch = marked(collate(mixed_items()))
    before = vectors(tiny_model, batch)
    tiny_model.add_task_conditioning(settings)
    names = {"router_task": "vqa"} if settings is ID else {}
    assert torch.equal(vectors(tiny_model, batch, **names), before)
    assert not torch.equal(vectors(trained(tiny_model), batch, **names), before)


@pytest.mark.parametrize("pooled_only", [False, True])
def test_logits_are_those_of_the_token_plus_u_times_e(tiny_model, pooled_only):
    tiny_model.add_task_conditioning(ID)
    trained(tiny_model)
    items = mixed_items()
    batch, tasks = collate(items), torch.arange(len(items)) % 4
    taken = {}
    layers = tiny_model.language_model.layers
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, inputs, output, n=n: taken.update({n: output}))
        for n, layer in enumerate(layers)
    ]
    with torch.no_grad():
        options = {"output_router_logits": True, "pooled_only": pooled_only}
        logits = tiny_model(**batch, router_task=tasks, **options).router_logits
    for hook in hooks:
        hook.remove()
    segment = batch["attention_mask"].nonzero()[:, 0]
    table = tiny_model.task_conditioning.embedding.weight
    for number, layer in enumerate(layers):
        rows = segment if len(logits[number]) == len(segment) else torch.arange(len(items))
        added = F.linear(table[tasks], layer.mlp.task_router.weight)[rows]
        torch.testing.assert_close(logits[number], taken[number] + added)


@pytest.mark.parametrize("settings", [ID, INSTRUCTION], ids=["id", "instruction"])
def test_an_items_vector_depends_on_its_own_task_alone(tiny_model, settings):
    """Batched equals one by one, with prefixes that could be shared, and with tokens dropped on the way."""
    tiny_model.add_task_conditioning(settings)
    trained(tiny_model)
    items = mixed_items()
    prefix = items[7].ids[:40]
    for item in (items[0], items[7]):  # a prefix that two items of different tasks share
        item.ids = prefix + item.ids
    names = [[*TASKS, None][n % 4] for n in range(len(items))]
    budget = {"token_pruning": {"layer": 4, "keep": 0.5}}
    whole = marked(collate(items))
    options = {"pooled_only": True, "adaptive_compute": budget}
    tasks = {"router_task": names} if settings is ID else {}
    together = vectors(tiny_model, whole, **tasks, **options)
    for number, item in enumerate(items):
        single = collate([item])
        single["instruction_mask"] = whole["instruction_mask"][number : number + 1, : len(item.ids)]
        own = {"router_task": names[number]} if settings is ID else {}
        torch.testing.assert_close(
            vectors(tiny_model, single, **own, **options)[0], together[number], atol=2e-5, rtol=1e-4
        )


def test_instruction_vector_is_a_projection_of_the_mean_embedding(tiny_model):
    tiny_model.add_task_conditioning(INSTRUCTION)
    batch = marked(collate(mixed_items()))
    conditioning, table = tiny_model.task_conditioning, tiny_model.get_input_embeddings().weight
    packed = batch["attention_mask"].bool()
    embeddings = table[batch["input_ids"]][packed].requires_grad_()
    segment = batch["attention_mask"].nonzero()[:, 0]
    is_instruction = batch["instruction_mask"][packed].bool()
    made = conditioning.of_instructions(embeddings, segment, is_instruction, 8)
    for item in range(8):
        words = table[batch["input_ids"][item][batch["instruction_mask"][item].bool()]]
        expected = conditioning.project.weight @ words.mean(0) if len(words) else torch.zeros(12)
        torch.testing.assert_close(made[item], expected)
    made.sum().backward()
    assert table.grad is None and conditioning.project.weight.grad is not None


def test_saved_with_the_model(tiny_model, tmp_path):
    tiny_model.add_task_conditioning(ID)
    trained(tiny_model).save_pretrained(tmp_path)
    loaded, info = MoEMBModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.task_conditioning == ID
    batch = collate(mixed_items())
    for task in ("vqa", None):
        expected = vectors(tiny_model, batch, router_task=task)
        assert torch.equal(vectors(loaded.eval(), batch, router_task=task), expected)


def test_missing_weights_mean_no_effect(tiny_model, tmp_path, tiny_settings):
    tiny_model.save_pretrained(tmp_path)
    config = MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID, task_conditioning=ID)
    loaded = MoEMBModel.from_pretrained(tmp_path, config=config).eval()
    batch = collate(mixed_items())
    assert torch.equal(vectors(loaded, batch, router_task="vqa"), vectors(tiny_model, batch))


def test_gradients_reach_u_and_then_e(tiny_model):
    tiny_model.add_task_conditioning(ID)
    batch, tasks = collate(mixed_items()), torch.arange(8) % 4

    def gradients():
        tiny_model.zero_grad()
        tiny_model(**batch, router_task=tasks).pooler_output.square().sum().backward()
        weight = tiny_model.language_model.layers[2].mlp.task_router.weight
        return weight.grad.abs().sum(), tiny_model.task_conditioning.embedding.weight.grad.abs().sum()

    u, e = gradients()
    assert u > 0 and e == 0  # U is zero
    trained(tiny_model)
    assert all(value > 0 for value in gradients())


@pytest.mark.parametrize("make", [lean_processor, qwen_processor])
def test_the_processor_marks_the_instruction(make):
    processor = make()
    items = ["hello there", "x", [{"role": "system", "content": "own"}, {"role": "user", "content": "chat"}]]
    assert "instruction_mask" not in processor(items, instruction="find it")
    processor.embedding["instruction_mask"] = True
    features = processor(items, instruction="find it")
    decoded = [
        processor.tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(features["input_ids"], features["instruction_mask"], strict=True)
    ]
    assert [text.removeprefix("<|im_start|>system\n") for text in decoded] == ["find it", "find it", "own"]
    bare = processor([items[0], [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]], instruction="")
    assert not bare["instruction_mask"].any()
    again = type(processor)(
        processor.image_processor, processor.tokenizer, processor.video_processor,
        chat_template=processor.chat_template, embedding=processor.embedding,
    )  # fmt: skip
    assert again.conventions()["instruction_mask"] is True


def test_through_the_processor_and_sentence_transformers(tmp_path, tiny_settings):
    from sentence_transformers import SentenceTransformer

    from moemb.trainers.repository import assemble_repository

    processor = lean_processor()
    model = build(tiny_settings, processor)
    model.add_task_conditioning(ID)
    trained(model)
    folder = assemble_repository(tmp_path / "tasks", model=model, processor=processor)
    embedder = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    texts = ["a cat", "another thing"]
    for task in ("vqa", None):
        expected = F.normalize(vectors(model, processor(texts), router_task=task))
        made = torch.tensor(embedder.encode(texts, **({} if task is None else {"router_task": task})))
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="names 'nothing': this model knows"):
        embedder.encode(texts, router_task="nothing")


def test_experts_are_pruned_with_their_rows_of_u(tmp_path, tiny_settings):
    """Equal to a router logit of minus infinity for the experts that went."""
    from moemb.trainers.prune_experts_repository import write_pruned_repository
    from moemb.trainers.repository import assemble_repository

    processor = lean_processor()
    model = build(tiny_settings, processor)
    model.add_task_conditioning(ID)
    source = assemble_repository(tmp_path / "whole", model=trained(model), processor=processor)
    keep = torch.stack([torch.randperm(8)[:5].sort().values for _ in range(8)])
    record = {"model": "whole", "saliency": "reap", "items": 0}
    pruned = MoEMBModel.from_pretrained(write_pruned_repository(source, tmp_path / "pruned", keep, record)).eval()
    assert pruned.language_model.layers[0].mlp.task_router.weight.shape == (5, 12)
    for layer, kept in zip(model.language_model.layers, keep, strict=True):
        mask = torch.full((8,), float("-inf")).index_fill(0, kept, 0.0)
        layer.mlp.task_router.register_forward_hook(lambda _, inputs, output, mask=mask: output + mask)
    features = processor(["one text", "another one"])
    expected = vectors(model, features, router_task="vqa")
    torch.testing.assert_close(vectors(pruned, features, router_task="vqa"), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "id"}, "must list the names of the tasks"),
        ({"kind": "id", "tasks": ["a", "a"]}, "must list the names of the tasks, each once"),
        ({"kind": "words"}, r"\['kind'\]` must be one of"),
        ({"kind": "instruction", "dim": 0}, r"\['dim'\]` must be a whole number from 1"),
        ({"kind": "instruction", "tasks": ["a"]}, "has no meaning with kind 'instruction'"),
        ({"kind": "id", "tasks": ["a"], "size": 3}, "unknown keys"),
    ],
)
def test_wrong_settings_are_refused(tiny_model, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_model.add_task_conditioning(settings)
    assert tiny_model.config.task_conditioning is None


def test_wrong_calls_are_refused(tiny_model):
    batch = collate(mixed_items())
    with pytest.raises(ValueError, match="`router_task` is 'vqa', but the routers of this model are not conditioned"):
        tiny_model(**batch, router_task="vqa")
    tiny_model.add_task_conditioning(ID)
    for task, message in (
        ("x", "names 'x': this model knows"), (torch.arange(3), "but there are 8 items"),
        (torch.full((8,), 9), "must be from 0 to 3"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tiny_model(**batch, router_task=task)
    with pytest.raises(ValueError, match="is conditioned already"):
        tiny_model.add_task_conditioning(INSTRUCTION)


def test_an_instruction_model_asks_for_the_mask(tiny_model):
    tiny_model.add_task_conditioning(INSTRUCTION)
    with pytest.raises(ValueError, match="pass `instruction_mask`, which the model's processor makes"):
        tiny_model(**collate(mixed_items()))

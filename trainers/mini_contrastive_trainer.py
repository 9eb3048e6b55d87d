"""The contrastive training of moemb-mini: makes an embedder of a pretrained model.

One step is one packed forward over all sub-batches of the mixture; each sub-batch is contrasted within itself, and all
rows with a teacher vector are also pulled towards it through linear heads that are thrown away after training.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from modeling_moemb import MoEMBModel

from .data import BatchEncoder, PictureShape
from .documents import DocumentSource, language_batch
from .errors import MoEMBError
from .losses import (
    contrastive_loss,
    distillation_loss,
    next_token_loss,
)
from .mini_contrastive_config import MiniContrastiveConfig
from .mini_contrastive_validation import ValidationSet
from .mixture import Group, Mixture
from .packed_trainer import PackedTrainer
from .sources import (
    EmojiSource,
    IconSource,
    MotionSource,
    SkinEditSource,
    StripSource,
    TextPairSource,
    TranslationSource,
)
from .tokenizer import EMB, load_tokenizer


LANGUAGE_KINDS = ("emoji", "translation", "gloss", "strip")
INSTRUCTIONS = (
    "Represent the user's input.",
    "Represent this query for retrieval.",
    "Find an image that matches the given text.",
    "Find the text that describes the given image.",
    "Retrieve relevant documents for the query.",
)


class MiniContrastiveError(MoEMBError, ValueError):
    """A contrastive training that cannot start; the text names the value and the remedy."""


class TeacherHeads(nn.Module):
    """Linear maps from the embedding to the teachers' spaces. They are trained beside the model and thrown away.

    Args:
        hidden_size (`int`): Size of the embedding.
        text_size (`int`): Size of the text teacher's vectors.
        vision_size (`int`): Size of the vision teacher's vectors.
    """

    def __init__(self, hidden_size: int, text_size: int, vision_size: int):
        super().__init__()
        self.text = nn.Linear(hidden_size, text_size)
        self.vision = nn.Linear(hidden_size, vision_size)


def build_mixture(args: MiniContrastiveConfig, corpus, teacher_texts, teacher_images) -> Mixture:
    """The mixture that a recipe describes."""
    sources, rates = [], []
    for name, source_class, extra in (
        ("emoji", EmojiSource, {}),
        ("icon", IconSource, {}),
        ("translation", TranslationSource, {}),
        ("gloss", TextPairSource, {"pair_sources": ("wordnet",), "name": "gloss"}),
        ("article", TextPairSource, {"pair_sources": ("wordnet-article",), "name": "article"}),
        ("strip", StripSource, {}),
        ("motion", MotionSource, {}),
        ("edit", SkinEditSource, {}),
    ):
        chunk = getattr(args, f"{name}_chunk")
        sources.append(source_class(corpus, chunk, teacher_texts, teacher_images, **extra))
        rates.append(getattr(args, f"{name}_rate"))
    return Mixture(sources, rates, args.seed)


class MiniContrastiveTrainer(PackedTrainer):
    """Trains an embedder on a mixture of homogeneous sub-batches.

    Args:
        model (`MoEMBModel`): The model, with `pooling="emb"`.
        args ([`MiniContrastiveConfig`]): Settings.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        corpus (`Corpus`): The corpus.
    """

    best_metric = "score"

    def __init__(self, model: MoEMBModel, args: MiniContrastiveConfig, tokenizer, corpus):
        vision = model.config.vision_config
        shape = PictureShape(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        self.encoder = BatchEncoder(tokenizer, shape, token_multiple=256)
        self.text_index, self.text_vectors = corpus.text_teacher()
        self.image_index, self.image_vectors = corpus.vision_teacher()
        self.mixture = build_mixture(args, corpus, self.text_index, self.image_index)
        self.documents = DocumentSource(corpus) if args.language_rate else None
        self.validation = ValidationSet(corpus, BatchEncoder(tokenizer, shape), seed=args.seed)
        hidden_size = model.config.text_config.hidden_size
        torch.manual_seed(args.seed)
        heads = TeacherHeads(hidden_size, self.text_vectors.shape[1], self.image_vectors.shape[1])
        super().__init__(model, args, tokenizer, heads)

    # Batches

    def build_batch(self, step: int) -> dict:
        """All sub-batches of a step, encoded together: `inputs`, `groups` (without pictures) and teacher `targets`."""
        groups = self.mixture.groups(step)
        rng = np.random.default_rng([self.args.seed, step, 0x1257])
        samples = [sample for group in groups for sample in self._instruct(group, rng)]
        for group in groups:
            group.samples = []
        targets = {
            "text": self._targets([t for g in groups for t in g.text_targets], self.text_index, self.text_vectors),
            "vision": self._targets(
                [t for g in groups for t in g.image_targets], self.image_index, self.image_vectors
            ),
        }
        batch = {"inputs": self.encoder(samples), "groups": groups, "targets": targets}
        rate = self.args.language_rate
        if int((step + 1) * rate) > int(step * rate):
            batch["language"] = self._language_batch(rng)
        return batch

    def _language_batch(self, rng: np.random.Generator) -> dict:
        """Documents to model beside the contrast; each ends with `<emb>`, which the pooling of this model asks for."""
        count = self.args.language_documents
        samples = [sample for kind in LANGUAGE_KINDS for sample in self.documents.documents(kind, count, rng)]
        return language_batch(self.encoder, samples, EMB)

    def _instruct(self, group: Group, rng: np.random.Generator) -> list:
        """The group's samples, a few of its queries with an instruction."""
        asking = {row for contrast in group.contrasts for row in contrast.queries}
        draws = rng.random(len(group.samples))
        return [
            replace(sample, instruction=INSTRUCTIONS[int(rng.integers(len(INSTRUCTIONS)))])
            if row in asking and draws[row] < self.args.instruction_share
            else sample
            for row, sample in enumerate(group.samples)
        ]

    @staticmethod
    def _targets(names: list[str | None], index: dict[str, int], vectors: np.ndarray) -> dict[str, torch.Tensor]:
        """Rows that have a teacher vector, the distinct vectors, and which of them belongs to each row."""
        rows = [row for row, name in enumerate(names) if name is not None]
        numbers = np.array([index[names[row]] for row in rows], dtype=np.int64)
        distinct, inverse = np.unique(numbers, return_inverse=True)
        return {
            "rows": torch.tensor(rows, dtype=torch.long),
            "vectors": F.normalize(torch.from_numpy(vectors[distinct].astype(np.float32)), dim=-1),
            "index": torch.from_numpy(inverse.reshape(-1)),
        }

    # Losses

    def embed(self, model, inputs: dict) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Unit vectors float32 `[rows, d]` of a batch (its filler rows included), and the router logits per layer."""
        output = model(**inputs, pooled_only=True, output_router_logits=True)
        return F.normalize(output.pooler_output.float(), dim=-1), output.router_logits

    def group_loss(self, vectors: torch.Tensor, group: Group) -> torch.Tensor:
        """The weighted contrastive losses of one sub-batch; `vectors` float32 `[rows of the group, d]`."""
        numbers: dict = {}
        keys = torch.tensor([numbers.setdefault(key, len(numbers)) for key in group.keys])
        total = vectors.new_zeros(())
        for contrast in group.contrasts:
            queries, documents = torch.tensor(contrast.queries), torch.tensor(contrast.documents)
            positives = keys[queries][:, None] == keys[documents][None]
            same_row = queries[:, None] == documents[None]
            ignore = same_row if bool(same_row.any()) else None
            q, d = vectors[queries], vectors[documents]
            loss = contrastive_loss(q, d, positives, self.args.scale, ignore)
            if contrast.symmetric:
                loss = (loss + contrastive_loss(d, q, positives.T, self.args.scale)) / 2
            total = total + contrast.weight * loss
        return total

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        vectors, router_logits = self.embed(model, inputs["inputs"])
        total, start = vectors.new_zeros(()), 0
        for group in inputs["groups"]:
            rows = len(group.keys)
            loss = self.group_loss(vectors[start : start + rows], group)
            start += rows
            self.record(**{f"{group.source}_loss": loss.item()})
            total = total + getattr(self.args, f"{group.source}_weight") * loss
        for name, weight in (("text", self.args.text_teacher_weight), ("vision", self.args.vision_teacher_weight)):
            target = inputs["targets"][name]
            if weight and len(target["rows"]):
                predictions = getattr(self.heads, name)(vectors[target["rows"]])
                loss = distillation_loss(predictions, target["vectors"], target["index"], self.args.teacher_scale)
                self.record(**{f"{name}_teacher_loss": loss.item()})
                total = total + weight * loss
        total = total + self.router_loss(router_logits)
        if "language" in inputs:
            total = total + self._language_loss(model, inputs["language"])
        return (total, vectors) if return_outputs else total

    def _language_loss(self, model, batch: dict) -> torch.Tensor:
        output = model(**batch["inputs"], packed_hidden=True, output_router_logits=True)
        loss = next_token_loss(output.last_hidden_state, model.get_input_embeddings().weight, batch["labels"])
        self.record(language_loss=loss.item())
        return self.args.language_weight * loss + self.router_loss(output.router_logits)

    def validate(self) -> dict[str, float]:
        return self.validation.evaluate(self.model)


def prepare_emb(model: MoEMBModel, seed: int = 0) -> None:
    """Makes `<emb>` the pooled token of a pretrained language model: its row becomes the mean row plus some noise."""
    config = model.config
    if config.pooling == "emb":
        return
    if config.emb_token_id is None:
        raise MiniContrastiveError("The model's config has no emb_token_id: pretrain it with `moemb train` first.")
    table = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        noise = 1e-3 * torch.randn(table.shape[1], generator=generator)
        table[config.emb_token_id] = table.float().mean(dim=0) + noise
    config.pooling = "emb"


def build_trainer(args: MiniContrastiveConfig, corpus) -> MiniContrastiveTrainer:
    """Loads the model of `init_from` and builds the trainer around it.

    Raises:
        MiniContrastiveError: Without `init_from`.
    """
    if not args.init_from:
        raise MiniContrastiveError("contrastive training needs init_from: the `final` folder of a pretraining run")
    tokenizer = load_tokenizer(args.init_from)
    model = MoEMBModel.from_pretrained(args.init_from, dtype=torch.float32)
    prepare_emb(model, args.seed)
    return MiniContrastiveTrainer(model, args, tokenizer, corpus)

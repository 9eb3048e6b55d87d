"""Pretraining: builds moemb-mini's tokenizer and model, and trains it as a language model on interleaved documents.

The output layer is the embedding table (tied, at training time only: nothing is added to what is saved), and the
router's losses keep every expert in use, so that experts and router are native to the model.
"""

from pathlib import Path

import numpy as np
import torch

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.configuration_moemb import FIXED_ROUTERS

from .data import BatchEncoder, PictureShape, Sample
from .documents import DocumentSource, language_batch
from .losses import next_token_loss
from .packed_trainer import PackedTrainer
from .pretrain_config import PretrainConfig
from .tokenizer import (
    EMB,
    IM_END,
    IMAGE_PAD,
    PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    load_tokenizer,
    train_tokenizer,
    training_texts,
)


DOCUMENT_KINDS = ("emoji", "icon", "translation", "gloss", "strip", "clip")


def build_config(args: PretrainConfig, tokenizer) -> MoEMBConfig:
    """The model configuration that a pretraining recipe describes.

    Args:
        args ([`PretrainConfig`]): The recipe.
        tokenizer (`PreTrainedTokenizerFast`): Gives vocabulary size and special ids.

    Returns:
        `MoEMBConfig`: With `pooling="last"`: `<emb>` means nothing before contrastive training.
    """
    token_id = tokenizer.convert_tokens_to_ids
    text = {
        name: getattr(args, name)
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
            "initializer_range",
        )
    }  # fmt: skip
    if args.feed_forward in FIXED_ROUTERS:
        experts, per_token, shared = FIXED_ROUTERS[args.feed_forward]
        text |= {"num_experts": experts, "num_experts_per_tok": per_token, "shared_expert_intermediate_size": shared}
        text["moe_intermediate_size"] = args.intermediate_size
    return MoEMBConfig(
        feed_forward=args.feed_forward,
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 8192,
            "full_attention_interval": 4,
            "pad_token_id": token_id(PAD),
            "eos_token_id": token_id(IM_END),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": args.partial_rotary_factor,
                "mrope_section": list(args.mrope_section),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": args.vision_depth,
            "hidden_size": args.vision_hidden_size,
            "num_heads": args.vision_heads,
            "intermediate_size": args.vision_intermediate_size,
            "patch_size": args.patch_size,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": args.hidden_size,
            "num_position_embeddings": 64,
            "in_channels": 3,
            "initializer_range": args.initializer_range,
        },
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
        emb_token_id=token_id(EMB),
        tie_word_embeddings=True,
        pooling="last",
    )


class PretrainTrainer(PackedTrainer):
    """Trains a model as a language model on the corpus' documents.

    Args:
        model (`MoEMBModel`): The model.
        args ([`PretrainConfig`]): Settings.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        corpus (`Corpus`): The corpus.
    """

    best_metric = "negative_loss"

    def __init__(self, model: MoEMBModel, args: PretrainConfig, tokenizer, corpus):
        self.source = DocumentSource(corpus)
        self.corpus = corpus
        vision = model.config.vision_config
        shape = PictureShape(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        self.encoder = BatchEncoder(tokenizer, shape, token_multiple=256)
        self._validation: dict | None = None
        super().__init__(model, args, tokenizer)

    def build_batch(self, step: int) -> dict:
        rng = np.random.default_rng([self.args.seed, step])
        samples = []
        for kind in DOCUMENT_KINDS:
            samples += self.source.documents(kind, getattr(self.args, f"{kind}_documents"), rng)
        return self.encode(samples)

    def encode(self, samples: list[Sample]) -> dict:
        """See [`language_batch`]; a document ends with `<|endoftext|>`."""
        return language_batch(self.encoder, samples, PAD)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs["inputs"], packed_hidden=True, output_router_logits=True)
        loss = next_token_loss(output.last_hidden_state, model.get_input_embeddings().weight, inputs["labels"])
        self.record(language_loss=loss.item())
        total = loss + self.router_loss(output.router_logits)
        return (total, output) if return_outputs else total

    def validate(self) -> dict[str, float]:
        if self._validation is None:
            self._validation = self._validation_batches()
        losses = {}
        for kind, batch in self._validation.items():
            output = self.model(**batch["inputs"], packed_hidden=True)
            table = self.model.get_input_embeddings().weight
            losses[f"{kind}_loss"] = next_token_loss(output.last_hidden_state, table, batch["labels"]).item()
        mean = sum(losses.values()) / len(losses)
        return {**losses, "loss": mean, "negative_loss": -mean}

    def _validation_batches(self) -> dict[str, dict]:
        """Documents of *validation* concepts and text pairs, the same at every evaluation."""
        rng = np.random.default_rng([self.args.seed, 0xE7A1])
        count = self.args.validation_documents
        images = [
            (row, info)
            for row, info in enumerate(self.corpus.image_rows)
            if info["split"] == "validation" and info.get("concept")
        ]
        picked = [images[i] for i in rng.permutation(len(images))[:count]]
        emoji = [Sample((self.corpus.images[row], self.source.lines(info["concept"], rng))) for row, info in picked]
        pairs = [pair for pair in self.corpus.text_pairs if pair["split"] == "validation"]
        gloss = [
            Sample((f"{pairs[i]['document']}: {pairs[i]['query']}",)) for i in rng.permutation(len(pairs))[:count]
        ]
        return {kind: self.encode(samples) for kind, samples in (("emoji", emoji), ("gloss", gloss)) if samples}


def build_trainer(args: PretrainConfig, corpus) -> PretrainTrainer:
    """Builds or loads tokenizer and model, and the trainer around them.

    Without `init_from` the tokenizer is trained on the corpus and the model initialised from the recipe's shape.
    """
    if args.init_from:
        tokenizer = load_tokenizer(args.init_from)
        model = MoEMBModel.from_pretrained(args.init_from, dtype=torch.float32)
    else:
        saved = Path(args.output_dir) / "tokenizer"
        if saved.is_dir():
            tokenizer = load_tokenizer(saved)
        else:
            tokenizer = train_tokenizer(training_texts(corpus), args.vocab_size)
            tokenizer.save_pretrained(saved)
        torch.manual_seed(args.seed)
        model = MoEMBModel(build_config(args, tokenizer))
    return PretrainTrainer(model, args, tokenizer, corpus)

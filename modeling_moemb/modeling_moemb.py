"""MoEMB: a sparse mixture-of-experts universal multimodal embedder on a Qwen3.5-MoE backbone.

Any mix of text, images, video frames and document pages goes in, one vector comes out: vision tower -> packed decoder
(3 Gated DeltaNet blocks to 1 attention block, each with routed and shared experts) -> state of the `<emb>` token.

Departures from transformers' `Qwen3_5MoeModel`, whose parameter names are kept: the decoder runs packed, without
padding; an item's vector does not depend on its batch; there is no cache, because nothing is generated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .adaptive_moemb import ComputeDial, draws_random
from .compute_moemb import ComputeRecord
from .configuration_moemb import MoEMBConfig, validate_adaptive_compute
from .decoder_moemb import DecoderOutput, MoEMBTextModel
from .packing_moemb import IMAGE, TEXT, VIDEO, PackedTokens, pack_batch
from .prefix_moemb import may_share, shared_packing
from .pretrained_moemb import MoEMBPreTrainedModel
from .pruning_moemb import fingerprints
from .vision_moemb import MoEMBVisionModel


@dataclass
class MoEMBOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, sequence, hidden)`, *optional*):
            Final-normed token states, zero at padding and at dropped tokens. Absent with `pooled_only=True`; with
            `packed_hidden=True` it has shape `(tokens, hidden)` instead.
        pooler_output (`torch.FloatTensor` of shape `(items, hidden)`):
            Final-normed state of each item's pooled token, not L2-normalised.
        router_logits (`tuple(torch.FloatTensor)` of `(tokens, num_experts)`, *optional*):
            fp32 logits of every decoder block over the packed tokens that are alive there (the last block only over
            the pooled tokens when `pooled_only=True`).
        hidden_states (`tuple(torch.FloatTensor)` of `(batch, sequence, hidden)`, *optional*):
            Token states before each block and after the last one, zero at padding and at dropped tokens.
        packed (`PackedTokens`, *optional*): the packing of the rows, with `packed_hidden=True`.
        compute (`ComputeRecord`, *optional*): what was executed, with `output_compute=True`; see `count_flops`.
        keep_mask (`torch.BoolTensor` of shape `(batch, sequence)`, *optional*): the tokens that were alive in the last
            block, with `output_compute=True`.
        beta (`tuple(torch.FloatTensor)` of `(batch, sequence, value_heads)`, *optional*): write strengths in every
            Gated DeltaNet block, fp32, zero at padding and at dropped tokens, with `output_beta=True`.
    """

    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed: PackedTokens | None = None
    compute: ComputeRecord | None = None
    keep_mask: torch.BoolTensor | None = None
    beta: tuple[torch.FloatTensor, ...] | None = None


class MoEMBModel(MoEMBPreTrainedModel):
    """Universal multimodal embedder. Parameter names are those of transformers' `Qwen3_5MoeModel`.

    Args:
        config ([`MoEMBConfig`]): the configuration.
    """

    input_modalities = ("image", "video", "text")
    accepts_loss_kwargs = False

    def __init__(self, config: MoEMBConfig):
        super().__init__(config)
        self.visual = MoEMBVisionModel(config.vision_config)
        self.language_model = MoEMBTextModel(config.text_config, config.experts_backend)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """Load a model, see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the checkpoint does not hold the routed experts in this model's layout, such as a stock
                checkpoint with one tensor per expert: they would be left random.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(key for key in info["missing_keys"] if ".mlp.experts." in key)
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of routed experts ({missing[0]}, ...): if it is a stock "
                "Qwen3.5-MoE checkpoint, turn it into a MoEMB repository with `moemb convert --from DIR --to DIR`"
            )
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.language_model.embed_tokens = value

    def set_adaptive_compute(self, settings: dict | None) -> None:
        """Set the default compute budget of this model (`None`: full compute); saved with the configuration."""
        self.config.adaptive_compute = validate_adaptive_compute(settings, self.config.text_config)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        adaptive_compute: dict | None = None,
        output_router_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        pooled_only: bool = False,
        packed_hidden: bool = False,
        output_compute: bool = False,
        output_beta: bool = False,
        share_prefixes: bool = True,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_k: torch.IntTensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: torch.IntTensor | None = None,
    ) -> MoEMBOutput | tuple:
        r"""
        Embed a batch of items.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`): token ids; media placeholders as the
                processor writes them. Exactly one of `input_ids` and `inputs_embeds`.
            attention_mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*): 1 for tokens, 0 for pads, on
                either side.
            position_ids (`torch.LongTensor`, *optional*): overrides the multimodal positions; must not restart.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, sequence, hidden)`, *optional*): embeddings instead
                of ids; media placeholders are then found by `mm_token_type_ids`, and pooling is at the last token.
            pixel_values, pixel_values_videos (`torch.Tensor` of shape `(patches, patch_dim)`, *optional*): patches.
            image_grid_thw, video_grid_thw (`torch.LongTensor` of shape `(count, 3)`, *optional*): patch grids.
            mm_token_type_ids (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): 0 text, 1 image, 2 video;
                derived from the placeholder ids when absent.
            cu_seq_lens_q (`torch.IntTensor` of shape `(items + 1,)`, *optional*): item boundaries of a flattened
                batch of shape `(1, tokens)`.
            adaptive_compute (`dict`, *optional*): compute budget of this call, see [`validate_adaptive_compute`];
                `{}` means full compute; the configuration's when `None`.
            pooled_only (`bool`, defaults to `False`): return only `pooler_output`; the last block then computes
                queries, experts and norm for the pooled tokens alone (same vectors).
            packed_hidden (`bool`, defaults to `False`): return `last_hidden_state` packed, `(tokens, hidden)`.
            output_compute (`bool`, defaults to `False`): also return what was executed and which tokens were kept.
            output_beta (`bool`, defaults to `False`): also return the write strengths.
            share_prefixes (`bool`, defaults to `True`): with `pooled_only`, in evaluation mode and without gradients,
                compute leading text tokens that several items have in common once (same vectors). Has no effect when
                something of every token is asked for, and with budgets that look at a whole item.
            output_attentions (`bool`, *optional*): attention weights are never formed; `True` is refused.
            use_cache (`bool`, *optional*): nothing is generated; without effect.
            cu_seq_lens_k, max_length_q, max_length_k, seq_idx (*optional*): come with `cu_seq_lens_q` from
                transformers' flattening collator and say the same; refused without it.

        Raises:
            ValueError: for inputs that would silently embed something else; names the item and the remedy.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
        if output_attentions:
            raise ValueError("`output_attentions=True` is not possible: attention weights are never formed")
        if cu_seq_lens_q is None and any(
            argument is not None for argument in (cu_seq_lens_k, max_length_q, max_length_k, seq_idx)
        ):
            raise ValueError("a flattened batch needs `cu_seq_lens_q`: it says where each item starts")
        modality = self._modality(input_ids, inputs_embeds, mm_token_type_ids)
        grids = {IMAGE: image_grid_thw, VIDEO: video_grid_thw}
        merge = self.config.vision_config.spatial_merge_size
        packed = pack_batch(modality, attention_mask, cu_seq_lens_q, grids, merge, position_ids)
        if input_ids is not None:
            embeddings = self.get_input_embeddings()(self._checked_ids(input_ids, packed))
        else:
            embeddings = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])[packed.source]
        pixels = {IMAGE: pixel_values, VIDEO: pixel_values_videos}
        hidden_states = embeddings
        for kind in (IMAGE, VIDEO):
            hidden_states = self._insert_media(hidden_states, packed.modality, kind, pixels[kind], grids[kind])
        self._check_pooled(input_ids, packed)

        given = self.config.adaptive_compute if adaptive_compute is None else adaptive_compute
        budget = validate_adaptive_compute(given, self.config.text_config) or {}
        pooled_last = pooled_only and not output_hidden_states
        if output_router_logits is None:
            output_router_logits = self.config.text_config.output_router_logits
        whole = packed
        asked = position_ids is not None or output_router_logits or packed_hidden or output_beta
        if share_prefixes and pooled_last and not asked and may_share(budget):
            hidden_states, packed = self._shared(hidden_states, packed, input_ids)
        dial = None
        if budget or output_compute or output_beta:
            words = None
            if draws_random(budget):
                words = self._words(embeddings if input_ids is None else input_ids, packed, pixels)
            dial = ComputeDial(budget, self.config.text_config, packed, words, output_compute, output_beta)
        decoded = self.language_model(hidden_states, packed, dial, pooled_last, bool(output_hidden_states))
        output = self._output(decoded, dial, whole, modality.shape, pooled_only, pooled_last, packed_hidden)
        if output.compute is not None:
            present = [grid for grid in grids.values() if grid is not None]
            output.compute.grids = [tuple(row) for grid in present for row in grid.tolist()]
        if output_router_logits:
            output.router_logits = tuple(decoded.router_logits)
        return output.to_tuple() if return_dict is False else output

    def _output(
        self,
        decoded: DecoderOutput,
        dial: ComputeDial | None,
        whole: PackedTokens,
        shape: tuple[int, int],
        pooled_only: bool,
        pooled_last: bool,
        packed_hidden: bool,
    ) -> MoEMBOutput:
        """What the caller sees, on the padded batch of `shape`.

        `whole` is the packing of all tokens; `pooled_last`: the last block ran for the pooled ones alone.
        """
        packed, final = decoded.packed, decoded.final
        last_hidden_state = hidden_states = keep_mask = None
        if not pooled_only:
            last_hidden_state = final if packed_hidden else packed.unpack(final, *shape)
        if decoded.states:
            hidden_states = tuple(rows.unpack(state, *shape) for state, rows in [*decoded.states, (final, packed)])
        record = None if dial is None else dial.record
        if record is not None:
            keep_mask = torch.zeros(shape, dtype=torch.bool, device=packed.source.device)
            keep_mask.view(-1)[packed.source] = True
            keep_mask.view(-1)[whole.source] |= whole.modality == TEXT  # never dropped; shared text stands there once
        betas = None if dial is None else dial.betas
        return MoEMBOutput(
            last_hidden_state=last_hidden_state,
            pooler_output=final if pooled_last else final[packed.last_rows],
            hidden_states=hidden_states,
            packed=packed if packed_hidden else None,
            compute=record,
            keep_mask=keep_mask,
            beta=None if betas is None else tuple(rows.unpack(beta, *shape) for beta, rows in betas),
        )

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: torch.LongTensor) -> Tensor:
        """Merged vision tokens of images, `(tokens, hidden)`."""
        return self.visual(pixel_values, image_grid_thw)

    def get_video_features(self, pixel_values_videos: Tensor, video_grid_thw: torch.LongTensor) -> Tensor:
        """Merged vision tokens of videos, `(tokens, hidden)`."""
        return self.visual(pixel_values_videos, video_grid_thw)

    def _modality(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, given: Tensor | None) -> Tensor:
        if given is not None:
            shape = tuple((inputs_embeds if input_ids is None else input_ids).shape[:2])
            if tuple(given.shape) != shape:
                raise ValueError(f"`mm_token_type_ids` has shape {tuple(given.shape)} but the inputs {shape}")
            if bool(((given < TEXT) | (given > VIDEO)).any()):
                raise ValueError("`mm_token_type_ids` must be 0 (text), 1 (image) or 2 (video) everywhere")
            return given.long()
        if input_ids is None:
            return torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        image, video = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
        return image * IMAGE + video * VIDEO

    def _checked_ids(self, input_ids: Tensor, packed: PackedTokens) -> Tensor:
        """The packed ids; on an accelerator an id outside the vocabulary would end the process."""
        ids, size = input_ids.reshape(-1)[packed.source], self.config.text_config.vocab_size
        outside = ((ids < 0) | (ids >= size)).nonzero()
        if outside.numel():
            item, token = int(packed.segment[outside[0]]), int(ids[outside[0]])
            raise ValueError(f"item {item} holds the token id {token}, outside the vocabulary of {size} tokens")
        return ids

    def _shared(
        self, hidden_states: Tensor, packed: PackedTokens, input_ids: Tensor | None
    ) -> tuple[Tensor, PackedTokens]:
        """The embeddings and the packing with shared prefixes, at inference and where that pays."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or input_ids is None:
            return hidden_states, packed
        found = shared_packing(packed, input_ids.reshape(-1)[packed.source])
        return (hidden_states, packed) if found is None else (hidden_states[found[1]], found[0])

    def _words(self, content: Tensor, packed: PackedTokens, pixels: dict[int, Tensor | None]) -> Tensor:
        """A number for what each packed token is: its id (or the bits of its embedding), or those of its pixels."""
        floating = content.is_floating_point()
        words = fingerprints(content) if floating else content.reshape(-1)[packed.source].long()
        for kind, patches in pixels.items():
            rows = (packed.modality == kind).nonzero().squeeze(1)
            if patches is not None and len(rows):
                words = words.index_copy(0, rows, fingerprints(patches).view(len(rows), -1).sum(1))
        return words

    def _insert_media(
        self, hidden_states: Tensor, modality: Tensor, kind: int, pixels: Tensor | None, grid: Tensor | None
    ) -> Tensor:
        if pixels is None:
            if grid is not None:
                raise ValueError("a media grid was passed without its pixel values")
            return hidden_states
        name = "image" if kind == IMAGE else "video"
        patches = 0 if grid is None else int(grid.prod(dim=-1).sum())
        if patches != pixels.shape[0]:
            raise ValueError(f"`{name}_grid_thw` describes {patches} patches but {pixels.shape[0]} were passed")
        features = self.visual(pixels, grid).to(hidden_states)
        rows = (modality == kind).nonzero().squeeze(1)
        if rows.shape[0] != features.shape[0]:
            raise ValueError(
                f"the inputs hold {rows.shape[0]} media tokens of type {kind} but the pixel values make "
                f"{features.shape[0]}"
            )
        return hidden_states.index_copy(0, rows, features)

    def _check_pooled(self, input_ids: Tensor | None, packed: PackedTokens) -> None:
        """The pooled token is the last one of its item; with `pooling="emb"` it must be `<emb>`."""
        if self.config.pooling == "last" or input_ids is None:
            return
        last = packed.last_rows
        if self.config.emb_token_id is None:
            raise ValueError("`pooling='emb'` needs `config.emb_token_id`; set it, or use `pooling='last'`")
        is_emb = input_ids.reshape(-1)[packed.source] == self.config.emb_token_id
        misplaced = (~is_emb[last]).nonzero()
        count = torch.bincount(packed.segment[is_emb], minlength=packed.num_items)
        if misplaced.numel() or bool((count != 1).any()):
            item = int(misplaced[0]) if misplaced.numel() else int((count != 1).nonzero()[0])
            raise ValueError(
                f"item {item} must hold the `<emb>` token (id {self.config.emb_token_id}) exactly once, as its last "
                "token: build inputs with the model's processor, or use `pooling='last'`"
            )


__all__ = ["MoEMBModel", "MoEMBOutput", "MoEMBPreTrainedModel", "MoEMBTextModel"]

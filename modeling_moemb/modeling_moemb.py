"""MoEMB: a sparse mixture-of-experts universal multimodal embedder on a Qwen3.5-MoE backbone.

Any mix of text, images, video frames and document pages goes in, one vector comes out: vision tower -> packed decoder
(3 Gated DeltaNet blocks to 1 attention block, each with routed and shared experts) -> state of the `<emb>` token.

Departures from transformers' `Qwen3_5MoeModel`, whose parameter names are kept: the decoder runs packed, without
padding; an item's vector does not depend on its batch; there is no cache, because nothing is generated.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .adaptive_moemb import ComputeDial, draws_random
from .configuration_moemb import MoEMBConfig, validate_adaptive_compute
from .decoder_moemb import MoEMBTextModel
from .gates_moemb import MoEMBGates, attach_gates
from .gating_moemb import GatePolicy
from .outputs_moemb import MoEMBOutput, model_output
from .packing_moemb import IMAGE, TEXT, VIDEO, PackedTokens, pack_batch
from .prefix_moemb import may_share, shared_packing
from .pretrained_moemb import MoEMBPreTrainedModel
from .pruning_moemb import fingerprints
from .settings_moemb import without_gates
from .task_conditioning_moemb import MoEMBTaskConditioning, router_condition, validate_task_conditioning
from .vision_moemb import MoEMBVisionModel


_FEED_FORWARD = re.compile(r"\.mlp\.(experts|gate_proj|up_proj|down_proj)\b")


logger = logging.get_logger(__name__)


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
        self.language_model = MoEMBTextModel(config.text_config, config.experts_backend, config.feed_forward)
        self.task_conditioning: MoEMBTaskConditioning | None = None
        if config.task_conditioning is not None:
            self.task_conditioning = MoEMBTaskConditioning(config, self.language_model.layers)
        self.gates = None if config.gates is None else MoEMBGates(config.gates, config.text_config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """Load a model, see `PreTrainedModel.from_pretrained`. Gates whose weights are missing are switched off.

        Raises:
            ValueError: if the checkpoint does not hold the routed experts in this model's layout, such as a stock
                checkpoint with one tensor per expert: they would be left random.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(key for key in info["missing_keys"] if _FEED_FORWARD.search(key))
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of routed experts or the dense network ({missing[0]}): "
                "if it is a stock Qwen3.5 checkpoint, make a repository of it with `moemb convert --from DIR --to DIR`"
            )
        absent = sorted({key.split(".")[1] for key in info["missing_keys"] if key.startswith("gates.")})
        if absent:
            logger.warning(f"the checkpoint lacks weights of the gates {absent}: they are switched off")
            model.remove_gates(absent)
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.language_model.embed_tokens = value

    def set_adaptive_compute(self, settings: dict | None) -> None:
        """Set the default compute budget of this model (`None`: full compute); saved with the configuration."""
        self.config.adaptive_compute = validate_adaptive_compute(settings, self.config.text_config, self.config.gates)

    def add_gates(self, settings: dict) -> None:
        """Give the model gates, untrained and without any effect; saved with it. See [`attach_gates`]."""
        attach_gates(self, settings)

    def remove_gates(self, kinds: list[str]) -> None:
        """Take gates (`"keep"`, `"gradual"`, `"skip"`, `"null"`) and the parts of the budget that need them away."""
        left = {kind: value for kind, value in (self.config.gates or {}).items() if kind not in kinds}
        self.config.gates = left or None
        self.config.adaptive_compute = without_gates(self.config.adaptive_compute, kinds)
        if self.gates is not None:
            self.gates.switch_off(kinds)
            self.gates = self.gates if left else None

    def add_task_conditioning(self, settings: dict) -> None:
        """Condition the routers on the task of an item, by [`MoEMBTaskConditioning`]; saved with the model.

        The vectors of the model do not change: what is added to the router logits starts at zero.

        Args:
            settings (`dict`): `{"kind": "id", "tasks": [names]}` for an embedding of each task, named by
                `router_task` in `forward`, or `{"kind": "instruction"}` for one computed from the item's instruction;
                `dim` (by default 64) is its length.

        Raises:
            ValueError: for wrong settings, a model without learned routers, or one that is conditioned already.
        """
        if self.config.task_conditioning is not None:
            raise ValueError(f"the model is conditioned already: {self.config.task_conditioning}")
        if self.config.feed_forward != "moe":
            raise ValueError(f"task conditioning needs a router, but `feed_forward` is {self.config.feed_forward!r}")
        self.config.task_conditioning = validate_task_conditioning(settings)
        self.task_conditioning = MoEMBTaskConditioning(self.config, self.language_model.layers)
        self.task_conditioning.initialise(self.get_input_embeddings().weight)

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
        router_task: str | Sequence[str | None] | torch.LongTensor | None = None,
        instruction_mask: Tensor | None = None,
        gate_policy: GatePolicy | None = None,
        rollouts: int | Sequence[int] = 1,
        gate_inputs: Sequence[tuple[str, int, tuple[Tensor, ...]]] | None = None,
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
            router_task (`str`, `list[str]` or `torch.LongTensor` of shape `(items,)`, *optional*): with a conditioning
                by task id, the task of all items or of each, by name or number; unknown when `None`.
            instruction_mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*): with a conditioning by
                instruction, nonzero at its tokens; made by the processor.
            gate_policy (`Callable[[GateQuery], GateDecision | torch.Tensor | None]`, *optional*): decides for the
                gates of the budget in place of their thresholds: what `True` names is removed, and floats weight what
                is kept; see [`GateDecision`].
            rollouts (`int` or `list[int]`, defaults to 1): with `pooled_only`, lay every item out so many times (or
                each its own number of times) from the first block on that a gate of the budget decides for, so that
                `gate_policy` can decide differently for each; what comes before is computed once. Rows of
                `pooler_output`, and of `keep_mask` for a padded batch, are then the rollouts of the first item, those
                of the second one, and so on; the `source` of a token in copy `g` is raised by `g * batch * sequence`.
            gate_inputs (`list[tuple[str, int, tuple[torch.Tensor]]]`, *optional*): kind, block and inputs of gates, as
                queries held them: only `gate_logits` is computed from them, differentiably.
            output_attentions (`bool`, *optional*): attention weights are never formed; `True` is refused.
            use_cache (`bool`, *optional*): nothing is generated; without effect.
            cu_seq_lens_k, max_length_q, max_length_k, seq_idx (*optional*): come with `cu_seq_lens_q` from
                transformers' flattening collator and say the same; refused without it.

        Raises:
            ValueError: for inputs that would silently embed something else; names the item and the remedy.
        """
        if gate_inputs is not None:
            return MoEMBOutput(gate_logits=[self.gates.logits(*given) for given in gate_inputs])
        if rollouts != 1 and (not pooled_only or output_hidden_states or output_beta):
            raise ValueError("`rollouts` needs `pooled_only=True`, and goes without hidden states and beta")
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
        budget = validate_adaptive_compute(given, self.config.text_config, self.config.gates) or {}
        pooled_last = pooled_only and not output_hidden_states
        if output_router_logits is None:
            output_router_logits = self.config.text_config.output_router_logits
        whole = packed
        asked = position_ids is not None or output_router_logits or packed_hidden or output_beta
        condition = router_condition(self.task_conditioning, embeddings, packed, router_task, instruction_mask)
        # the routing of a prefix would depend on the item it belongs to
        asked |= condition is not None or gate_policy is not None or rollouts != 1
        if share_prefixes and pooled_last and not asked and may_share(budget):
            hidden_states, packed = self._shared(hidden_states, packed, input_ids)
        dial = None
        if budget or output_compute or output_beta or rollouts != 1:
            words = None
            if draws_random(budget):
                words = self._words(embeddings if input_ids is None else input_ids, packed, pixels)
            gated = (self.gates, gate_policy, rollouts, modality.numel())
            dial = ComputeDial(budget, self.config.text_config, packed, words, output_compute, output_beta, *gated)
        decoded = self.language_model(hidden_states, packed, dial, pooled_last, bool(output_hidden_states), condition)
        shown = (pooled_only, pooled_last, packed_hidden, rollouts)
        output = model_output(decoded, dial, whole, modality.shape, *shown)
        if output.compute is not None:
            present = [grid for grid in grids.values() if grid is not None]
            output.compute.grids = [tuple(row) for grid in present for row in grid.tolist()]
        if output_router_logits:
            output.router_logits = tuple(decoded.router_logits)
        return output.to_tuple() if return_dict is False else output

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

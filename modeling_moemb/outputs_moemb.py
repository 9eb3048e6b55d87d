"""What the model returns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from .adaptive_moemb import ComputeDial
from .compute_moemb import ComputeRecord
from .decoder_moemb import DecoderOutput
from .packing_moemb import TEXT, PackedTokens


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
            the pooled tokens when `pooled_only=True`); empty for a model without learned routers.
        hidden_states (`tuple(torch.FloatTensor)` of `(batch, sequence, hidden)`, *optional*):
            Token states before each block and after the last one, zero at padding and at dropped tokens.
        packed (`PackedTokens`, *optional*): the packing of the rows, with `packed_hidden=True`.
        compute (`ComputeRecord`, *optional*): what was executed, with `output_compute=True`; see `count_flops`.
        keep_mask (`torch.BoolTensor` of shape `(batch, sequence)`, *optional*): the tokens that were alive in the last
            block, with `output_compute=True`.
        beta (`tuple(torch.FloatTensor)` of `(batch, sequence, value_heads)`, *optional*): write strengths in every
            Gated DeltaNet block, fp32, zero at padding and at dropped tokens, with `output_beta=True`.
        gate_logits (`list[torch.FloatTensor]`, *optional*): with `gate_inputs`, and then nothing else.
    """

    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed: PackedTokens | None = None
    compute: ComputeRecord | None = None
    keep_mask: torch.BoolTensor | None = None
    beta: tuple[torch.FloatTensor, ...] | None = None
    gate_logits: list[torch.FloatTensor] | None = None


def model_output(
    decoded: DecoderOutput,
    dial: ComputeDial | None,
    whole: PackedTokens,
    shape: tuple[int, int],
    pooled_only: bool,
    pooled_last: bool,
    packed_hidden: bool,
    rollouts: int | Sequence[int] = 1,
) -> MoEMBOutput:
    """What the caller sees, on the padded batch of `shape`.

    Args:
        decoded (`DecoderOutput`): what the decoder made.
        dial (`ComputeDial`, *optional*): the compute budget that was at work.
        whole (`PackedTokens`): the packing of all tokens.
        shape (`tuple[int, int]`): of the padded batch.
        pooled_only (`bool`), packed_hidden (`bool`), rollouts (`int` or `list[int]`): as in `forward`.
        pooled_last (`bool`): whether the last block ran for the pooled tokens alone.
    """
    packed, final = decoded.packed, decoded.final
    last_hidden_state = hidden_states = None
    if not pooled_only:
        last_hidden_state = final if packed_hidden else packed.unpack(final, *shape)
    if decoded.states:
        hidden_states = tuple(rows.unpack(state, *shape) for state, rows in [*decoded.states, (final, packed)])
    record = None if dial is None else dial.record
    betas = None if dial is None else dial.betas
    return MoEMBOutput(
        last_hidden_state=last_hidden_state,
        pooler_output=final if pooled_last else final[packed.last_rows],
        hidden_states=hidden_states,
        packed=packed if packed_hidden else None,
        compute=record,
        keep_mask=None if record is None else _keep_mask(packed, whole, shape, rollouts),
        beta=None if betas is None else tuple(rows.unpack(beta, *shape) for beta, rows in betas),
    )


def _keep_mask(
    packed: PackedTokens, whole: PackedTokens, shape: tuple[int, int], rollouts: int | Sequence[int]
) -> torch.Tensor:
    copies = [rollouts] * whole.num_items if isinstance(rollouts, int) else list(rollouts)
    mask = torch.zeros((max(copies), *shape), dtype=torch.bool, device=packed.source.device)
    mask.view(-1)[packed.source] = True
    text = whole.source[whole.modality == TEXT]  # never dropped; shared text stands there once
    item = whole.segment[whole.modality == TEXT]
    for copy in range(max(copies)):
        there = torch.tensor([count > copy for count in copies], device=item.device)[item]
        mask[copy].view(-1)[text[there]] = True
    if shape[0] != whole.num_items:  # a flattened batch: one row per copy
        return mask.flatten(0, 1)
    rows = [mask[:count, item] for item, count in enumerate(copies)]
    return torch.cat(rows)


__all__ = ["MoEMBOutput", "model_output"]

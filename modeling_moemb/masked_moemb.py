"""Token mixers under a mask: differentiable stand-ins for removing tokens, for training gates.

A token with mask 0 stays in the row but is as if it were not there, which takes four things together: it writes
nothing to the memory of the delta rule, does not age it, is no key of the attention, and the convolution runs over the
survivors alone (a window holds the token itself and the survivors before it). With any of them left out the result is
that of another model than the one that is deployed. Masks between 0 and 1 weight a token's writing, ageing and
attention; who stands in a window is decided at one half. A masked token's own output says what would be if it were
kept, and is seen by nobody.
"""

import torch
from torch import Tensor

from .delta_rule_moemb import delta_rule
from .elementwise_moemb import rotate, sigmoid, softplus
from .layout_moemb import PackedLayout
from .packing_moemb import PackedTokens


def survivor_windows(alive: Tensor, packed: PackedTokens, taps: int) -> tuple[Tensor, Tensor]:
    """The rows that a causal convolution over the survivors reads.

    Args:
        alive (`torch.BoolTensor` of shape `(tokens,)`): the survivors.
        packed (`PackedTokens`): the tokens.
        taps (`int`): length of the window.

    Returns:
        `torch.LongTensor` of shape `(tokens, taps)`: the `taps - 1` survivors before each token, oldest first, and the
        token itself; `torch.BoolTensor` of the same shape: false where there are not so many.
    """
    survivors = alive.nonzero().squeeze(1)
    before = alive.long().cumsum(0) - alive.long()
    before_item = before[packed.cu_seqlens[:-1].long()][packed.segment]
    back = torch.arange(taps - 1, 0, -1, device=alive.device)
    place = before[:, None] - back
    valid = place >= before_item[:, None]
    index = torch.zeros_like(place) if len(survivors) == 0 else survivors[place.clamp(0, len(survivors) - 1)]
    own = torch.arange(len(alive), device=alive.device)[:, None]
    return torch.cat([index, own], 1), torch.cat([valid, torch.ones_like(alive)[:, None]], 1)


def masked_delta_net(
    mixer: torch.nn.Module, hidden_states: Tensor, packed: PackedTokens, layout: PackedLayout, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """[`MoEMBGatedDeltaNet`] under a mask.

    Args:
        mixer (`MoEMBGatedDeltaNet`): the mixer.
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): its input.
        packed (`PackedTokens`), layout (`PackedLayout`): the tokens.
        mask (`torch.FloatTensor` of shape `(tokens,)`): how much each token counts.

    Returns:
        The output, and beta as without a mask (`(tokens, value_heads)`, fp32).
    """
    index, valid = survivor_windows(mask.detach() > 0.5, packed, mixer.conv_kernel_size)
    projected, weight = mixer.in_proj_qkv(hidden_states).float(), mixer.conv1d.weight.squeeze(1).float()
    mixed = torch.zeros_like(projected)
    for tap in range(index.shape[1]):
        mixed = mixed + (projected[index[:, tap]] * valid[:, tap, None]) * weight[:, tap]
    mixed = mixer.conv_activation(mixed)
    beta = sigmoid(mixer.in_proj_b(hidden_states).float())
    decay = -mixer.A_log.float().exp() * softplus(mixer.in_proj_a(hidden_states).float() + mixer.dt_bias.float())
    with torch.autocast(hidden_states.device.type, enabled=False):
        mixed = delta_rule(*mixer._heads(mixed), decay * mask[:, None], beta * mask[:, None], layout)
    gate = mixer.in_proj_z(hidden_states).unflatten(-1, (-1, mixer.head_v_dim))
    return mixer.out_proj(mixer.norm(mixed, gate).flatten(-2)), beta


def masked_attention(
    mixer: torch.nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    layout: PackedLayout,
    mask: Tensor,
    query_rows: Tensor | None = None,
) -> Tensor:
    """[`MoEMBAttention`] under a mask: `A_ij` is proportional to `exp(s_ij) m_j`, and a token always sees itself.

    Args:
        mixer (`MoEMBAttention`): the mixer.
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): its input.
        position_embeddings (`tuple[torch.Tensor, torch.Tensor]`): cosine and sine.
        layout (`PackedLayout`): the tokens.
        mask (`torch.FloatTensor` of shape `(tokens,)`): how much each token counts as a key.
        query_rows (`torch.LongTensor` of shape `(items,)`, *optional*): the rows to return.
    """
    cos, sin = position_embeddings
    key = mixer.k_norm(mixer.k_proj(hidden_states).unflatten(-1, (-1, mixer.head_dim)))
    value = mixer.v_proj(hidden_states).unflatten(-1, (-1, mixer.head_dim))
    query, gate = mixer.q_proj(hidden_states).unflatten(-1, (-1, 2 * mixer.head_dim)).chunk(2, dim=-1)
    query = rotate(mixer.q_norm(query), cos, sin, value.dtype)
    key = rotate(key, cos, sin, value.dtype)
    outputs = []
    for index, _ in layout.causal_groups:  # the padding of an item repeats its last row, which is in its future
        outputs.append(_attend(query[index], key[index], value[index], mask[index], mixer.scaling).flatten(0, 1))
    mixed = torch.cat(outputs).index_select(0, layout.causal_order)
    mixed = (mixed * sigmoid(gate)).flatten(-2)
    return mixer.o_proj(mixed if query_rows is None else mixed[query_rows])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Causal attention of `(items, width, heads, dim)` with key weights `(items, width)`."""
    width, groups = query.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scores = torch.einsum("iqhd,ikhd->ihqk", query.float(), key.float()) * scaling
    future = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
    own = torch.eye(width, device=query.device)
    weight = torch.where(own.bool(), own, mask.float()[:, None, :]).masked_fill(future, 0)[:, None]
    # the largest score of those that count: a hidden one far above them would leave nothing
    top = scores.detach().masked_fill(weight.detach() <= 0, float("-inf")).amax(-1, keepdim=True)
    weights = (scores - top).clamp_max(30).exp() * weight
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("ihqk,ikhd->iqhd", weights, value.float()).to(value.dtype)


__all__ = ["masked_attention", "masked_delta_net", "survivor_windows"]

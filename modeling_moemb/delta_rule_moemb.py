"""Varlen gated delta rule, the recurrence of Gated DeltaNet, over packed tokens."""

import torch
from torch import Tensor

from .elementwise_moemb import unit_norm
from .kernels_moemb import kernel
from .layout_moemb import ChunkClass, PackedLayout
from .prefix_layout_moemb import SharedLayout


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout) -> Tensor:
    """[`gated_delta_rule`] by the kernel of this device or by torch; a kernel's output has the dtype of `value`."""
    states = (query, key, value, decay, beta)
    run = kernel("gated_delta_rule", *states, layout.cu_seqlens)
    return gated_delta_rule(*states, layout) if run is None else run(*states, layout.cu_seqlens)


def continued_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, shared: SharedLayout
) -> Tensor:
    """[`delta_rule`] where items continue prefixes, for inference.

    The whole chunks of a prefix run once where a state can be handed on; a kernel that takes none runs every item from
    its start.
    """
    states = (query, key, value, decay, beta)
    plain = kernel("gated_delta_rule", *states, shared.cu_seqlens)
    steps = shared.steps(True)
    start = value.new_empty(0, value.shape[1], key.shape[-1], value.shape[-1], dtype=torch.float32)
    tables = (steps.tails.states, steps.tail_rows, steps.silent)
    run = kernel("gated_delta_rule", *states, steps.tails.cu_seqlens, start, *tables)
    if run is not None:
        output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if (heads := steps.heads) is not None:
            none = (start, heads.states, True, steps.head_rows, torch.zeros_like(heads.states))
            _, start = run(*states, heads.cu_seqlens, *none, output)
        return run(*states, steps.tails.cu_seqlens, start, tables[0], False, *tables[1:], output)
    steps = shared.steps(plain is None)
    outputs, start = [], None
    if steps.heads is not None:
        heads = (tensor.index_select(0, steps.head_rows) for tensor in states)
        output, start = gated_delta_rule(*heads, steps.heads, return_final_state=True)
        outputs.append(output)
    tails = [tensor.index_select(0, steps.tail_rows) for tensor in states]
    if plain is None:
        outputs.append(gated_delta_rule(*tails, steps.tails, start))
    else:
        outputs.append(plain(*tails, steps.tails.cu_seqlens))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, steps.place)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    layout: PackedLayout,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Varlen gated delta rule by chunks, in fp32 (Gated DeltaNet, arXiv 2412.06464).

    Per value head, with `alpha = exp(decay)`:
    `S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`, `o_t = S_t q_t`; keys and queries are
    L2-normalised, queries scaled by `1 / sqrt(key_dim)`, and `S` starts at 0 in every item that is not given a state.

    Args:
        query, key (`torch.Tensor` of shape `(tokens, key_heads, key_dim)`): packed rows.
        value (`torch.Tensor` of shape `(tokens, value_heads, value_dim)`): `value_heads` is a multiple of
            `key_heads`; consecutive value heads share a key head.
        decay (`torch.FloatTensor` of shape `(tokens, value_heads)`): log decay, at most 0.
        beta (`torch.FloatTensor` of shape `(tokens, value_heads)`): write strength in (0, 1).
        layout (`PackedLayout`): index tables of the packing.
        initial_state (`torch.FloatTensor` of shape `(states, value_heads, key_dim, value_dim)`, *optional*): states to
            start from; `layout.state_of` says which item starts from which.
        return_final_state (`bool`, defaults to `False`): also return the state behind each item.

    Returns:
        `torch.FloatTensor` of shape `(tokens, value_heads, value_dim)`, fp32; with `return_final_state` also the
        states, fp32 of shape `(items, value_heads, key_dim, value_dim)`.
    """
    query, key, value = unit_norm(query, query.shape[-1] ** -0.5), unit_norm(key), value.float()
    final = None
    if return_final_state:
        final = value.new_empty(len(layout.lengths), value.shape[1], key.shape[-1], value.shape[-1])
    outputs = [
        _delta_rule_chunks(query, key, value, decay, beta, chunk, initial_state, final) for chunk in layout.chunks
    ]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output = flat.index_select(0, layout.chunk_order)
    return (output, final) if return_final_state else output


def _delta_rule_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk: ChunkClass,
    initial_state: Tensor | None,
    final_state: Tensor | None,
) -> Tensor:
    """One length class; returns `(chunks * size, value_heads, value_dim)` in the order of `chunk.index`.

    The states behind its items are written to `final_state`.
    """
    (num_chunks, size), flat = chunk.index.shape, chunk.index.reshape(-1)
    key_heads, value_heads = key.shape[1], value.shape[1]
    repeat = value_heads // key_heads

    def heads_first(states: Tensor) -> Tensor:  # (tokens, heads, dim) -> (heads, chunks, size, dim)
        return states.index_select(0, flat).view(num_chunks, size, *states.shape[1:]).permute(2, 0, 1, 3)

    query, key, value = heads_first(query), heads_first(key), heads_first(value)
    tail = ~chunk.valid[:, :, None]
    # a tail position neither writes (beta 0) nor ages the memory (decay 0)
    beta = beta.index_select(0, flat).view(num_chunks, size, -1).masked_fill(tail, 0).permute(2, 0, 1)
    decay = decay.index_select(0, flat).view(num_chunks, size, -1).masked_fill(tail, 0).permute(2, 0, 1).cumsum(-1)

    # pairs with the future become exp(0); the solver never reads them and the attention is cut to its lower triangle
    pairwise = (decay[..., :, None] - decay[..., None, :]).tril().exp()
    shared = (key_heads, 1, num_chunks, size, size)  # value heads of one key head share these products
    pairwise = pairwise.view(key_heads, repeat, num_chunks, size, size)
    key_t = key.transpose(-1, -2)
    system = ((key @ key_t).view(shared) * pairwise).view(value_heads, num_chunks, size, size) * beta[..., None]
    attention = ((query @ key_t).view(shared) * pairwise).view(value_heads, num_chunks, size, size).tril()

    written = value * beta[..., None]
    if len(chunk.active) == 1 and chunk.state is None and final_state is None:
        # every item fits one chunk: no state is carried
        written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        output = attention @ written
    else:
        key = key.repeat_interleave(repeat, dim=0)
        query = query.repeat_interleave(repeat, dim=0) * decay.exp()[..., None]
        read = key * (beta * decay.exp())[..., None]
        solved = torch.linalg.solve_triangular(
            system, torch.cat([written, read], dim=-1), upper=False, unitriangular=True
        )
        written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        total = decay[..., -1:]
        key = (key * (total - decay).exp()[..., None]).transpose(-1, -2)
        state = None if chunk.state is None else initial_state.index_select(0, chunk.state).transpose(0, 1)
        factors = (query, key, written, read, attention, total.exp()[..., None])
        output, last = _scan_chunks(*factors, chunk.active, state, final_state is not None)
        if final_state is not None:
            final_state[chunk.items] = last.transpose(0, 1)
    return output.permute(1, 2, 0, 3).reshape(num_chunks * size, value_heads, -1)


def _scan_chunks(
    query: Tensor,
    key: Tensor,
    written: Tensor,
    read: Tensor,
    attention: Tensor,
    total: Tensor,
    active: list[int],
    state: Tensor | None,
    keep_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Carry the state from chunk to chunk; the items alive at a step are a prefix of those of the step before.

    `state` (`(value_heads, items, key_dim, value_dim)`) is what the items start from. Returns the outputs and, with
    `keep_final`, the states behind the items.
    """
    outputs, ended, start = [], [], 0
    for step, count in enumerate(active):
        rows = slice(start, start + count)
        new = written[:, rows]
        if state is None:
            output = attention[:, rows] @ new
        else:
            new = new - read[:, rows] @ state
            output = query[:, rows] @ state + attention[:, rows] @ new
        outputs.append(output)
        left = active[step + 1] if step + 1 < len(active) else 0
        if left or keep_final:
            update = key[:, rows] @ new
            state = update if state is None else state * total[:, rows] + update
            if keep_final:
                ended.append(state[:, left:])
            state = state[:, :left]
        start += count
    return torch.cat(outputs, dim=1), torch.cat(ended[::-1], dim=1) if keep_final else None

"""The gated delta rule in Triton, forward, split by segment.

The first kernel has one program per (chunk, value head). It solves the chunk's triangular system and writes the output
of every segment's first chunk, which sees no state: a segment of one chunk is done there. The second has one program
per (segment, value head, block of value columns) and leaves at once unless its segment is longer; it carries the state
through the chunks in registers. Programs find their own bounds on the device, so the host waits for no length.
"""

import triton
import triton.language as tl

from .convolution import segment_of


@triton.jit
def unit_lower_inverse(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of `1 + system`, `system` strictly lower triangular of shape (SIZE, SIZE), SIZE 16, 32 or 64.

    The 16 x 16 blocks on the diagonal are inverted by forward substitution, all at once; what is left is nilpotent
    with an index of at most 4 in blocks, so its series ends after the cube. Powers of the whole system would do as
    well on paper, but their entries grow like binomial coefficients when keys are alike.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    inner = tl.arange(0, 16)
    own = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(system, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    solved = tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0) + tl.zeros_like(diagonal)
    for row in range(1, 16):
        here = inner[None, :, None] == row
        coefficients = tl.sum(tl.where(here, diagonal, 0.0), axis=1)
        known = tl.sum(coefficients[:, :, None] * solved, axis=1)
        solved = tl.where(here, solved - known[:, None, :], solved)
    inverse = tl.reshape(tl.where(own, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    if BLOCKS > 1:
        index = tl.arange(0, SIZE)
        below = tl.where((index[:, None] // 16) > (index[None, :] // 16), system, 0.0)
        rest = tl.dot(inverse, below, input_precision=PRECISION)
        series = tl.where(index[:, None] == index[None, :], 1.0, 0.0) - rest
        if BLOCKS > 2:
            square = tl.dot(rest, rest, input_precision=PRECISION)
            series += square - tl.dot(rest, square, input_precision=PRECISION)
        inverse = tl.dot(series, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def load_rows(POINTER, row, live, column, dim, stride):
    """Rows of `(tokens, dim)` in fp32; positions that are not live, and columns behind `dim`, are 0."""
    mask = live[:, None] & (column < dim)[None, :]
    rows = tl.load(POINTER + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
    return rows.to(tl.float32)


@triton.jit
def unit(rows, factor):
    """L2-normalised rows times `factor`."""
    return rows * (tl.rsqrt(tl.sum(rows * rows, axis=1) + 1e-6) * factor)[:, None]


@triton.jit
def decay_pairs(aged, index):
    """`exp(aged_i - aged_j)` where j is not behind i, else 0; the difference is cut before exp can overflow."""
    past = index[:, None] >= index[None, :]
    return tl.where(past, tl.exp(tl.where(past, aged[:, None] - aged[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=["segments", "steps"])
def chunk_kernel(
    QUERY,
    KEY,
    VALUE,
    DECAY,
    BETA,
    OUT,
    SOLVED,
    CU,
    FIRST_CHUNK,
    segments,
    steps,
    value_heads,
    repeat,
    key_dim,
    value_dim,
    scale,
    stride_query,
    stride_query_head,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    stride_decay,
    stride_beta,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve one chunk; write the output if it is its segment's first, the solution if the segment has more chunks."""
    chunk, head = tl.program_id(0) // value_heads, tl.program_id(0) % value_heads
    if chunk < tl.load(FIRST_CHUNK + segments):
        segment = segment_of(FIRST_CHUNK, chunk, segments, steps)
        first, end = tl.load(CU + segment), tl.load(CU + segment + 1)
        start = first + (chunk - tl.load(FIRST_CHUNK + segment)) * CHUNK
        index, column = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        row = start + index
        live = row < end
        key_head = (head // repeat).to(tl.int64)
        key = unit(load_rows(KEY + key_head * stride_key_head, row, live, column, key_dim, stride_key), 1.0)
        decay = tl.load(DECAY + row.to(tl.int64) * stride_decay + head, mask=live, other=0.0)
        beta = tl.load(BETA + row.to(tl.int64) * stride_beta + head, mask=live, other=0.0)
        pairs = decay_pairs(tl.cumsum(decay, axis=0), index)
        system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * pairs * beta[:, None]
        system = tl.where(index[:, None] > index[None, :], system, 0.0)
        solved = unit_lower_inverse(system, CHUNK, PRECISION) * beta[None, :]
        if end - first > CHUNK:
            place = (chunk.to(tl.int64) * value_heads + head) * CHUNK * CHUNK
            tl.store(SOLVED + place + index[:, None] * CHUNK + index[None, :], solved)
        if start == first:
            query = load_rows(QUERY + key_head * stride_query_head, row, live, column, key_dim, stride_query)
            attention = tl.dot(unit(query, scale), tl.trans(key), input_precision=PRECISION) * pairs
            VALUE += head.to(tl.int64) * stride_value_head
            for block in range(0, value_dim, VALUES):
                n = block + tl.arange(0, VALUES)
                new = tl.dot(
                    solved, load_rows(VALUE, row, live, n, value_dim, stride_value), input_precision=PRECISION
                )
                out = tl.dot(attention, new, input_precision=PRECISION)
                target = OUT + (row.to(tl.int64)[:, None] * value_heads + head) * value_dim + n[None, :]
                tl.store(target, out.to(OUT.dtype.element_ty), mask=live[:, None] & (n < value_dim)[None, :])


@triton.jit
def scan_kernel(
    QUERY,
    KEY,
    VALUE,
    DECAY,
    OUT,
    SOLVED,
    CU,
    FIRST_CHUNK,
    value_heads,
    repeat,
    key_dim,
    value_dim,
    blocks,
    scale,
    stride_query,
    stride_query_head,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    stride_decay,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry the state of a segment of several chunks; its first output stands already."""
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks) % value_heads
    segment = tl.program_id(0) // (blocks * value_heads)
    first, end = tl.load(CU + segment), tl.load(CU + segment + 1)
    if end - first > CHUNK:
        key_head = (head // repeat).to(tl.int64)
        QUERY += key_head * stride_query_head
        KEY += key_head * stride_key_head
        VALUE += head.to(tl.int64) * stride_value_head
        SOLVED += (tl.load(FIRST_CHUNK + segment).to(tl.int64) * value_heads + head) * CHUNK * CHUNK
        index, column = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        n = block * VALUES + tl.arange(0, VALUES)
        state = tl.zeros((KEYS, VALUES), dtype=tl.float32)
        for start in range(first, end, CHUNK):
            row = start + index
            live = row < end
            key = unit(load_rows(KEY, row, live, column, key_dim, stride_key), 1.0)
            decay = tl.load(DECAY + row.to(tl.int64) * stride_decay + head, mask=live, other=0.0)
            aged, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
            solved = tl.load(SOLVED + index[:, None] * CHUNK + index[None, :])
            SOLVED += CHUNK * CHUNK * value_heads
            place = row.to(tl.int64)[:, None]
            new = load_rows(VALUE, row, live, n, value_dim, stride_value)
            new -= tl.dot(key, state, input_precision=PRECISION) * tl.exp(aged)[:, None]
            new = tl.dot(solved, new, input_precision=PRECISION)
            query = unit(load_rows(QUERY, row, live, column, key_dim, stride_query), scale)
            attention = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay_pairs(aged, index)
            out = tl.dot(query, state, input_precision=PRECISION) * tl.exp(aged)[:, None]
            out = tl.dot(attention, new, out, input_precision=PRECISION)
            target = OUT + (place * value_heads + head) * value_dim + n[None, :]
            tl.store(target, out.to(OUT.dtype.element_ty), mask=live[:, None] & (n < value_dim)[None, :])
            left = tl.trans(key * tl.exp(total - aged)[:, None])
            state = tl.dot(left, new, state * tl.exp(total), input_precision=PRECISION)

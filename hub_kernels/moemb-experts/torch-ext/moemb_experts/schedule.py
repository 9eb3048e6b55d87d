"""Which rows each program works on, made on the device: the host never waits for a row count."""

import torch
import triton
import triton.language as tl


MAX_HEIGHT = 128


class Schedule:
    """The surviving (token, slot) pairs of a routing, sorted by expert and cut into tiles.

    Attributes:
        order (`torch.IntTensor` of shape `(tokens * slots,)`): flat pair index of each sorted row; inside an expert
            rows keep their order. Rows of skipped slots lie outside of all tiles.
        offsets (`torch.IntTensor` of shape `(experts + 1,)`): first sorted row of each expert.
        tile_expert, tile_row (`torch.IntTensor` of shape `(tiles,)`): expert (the number of experts marks an unused
            tile) and first sorted row of each tile.
        height (`int`): rows of a full tile. An expert's last tile shrinks to `height / 2` or `height / 4` rows
            when no more are left.
    """

    __slots__ = ("height", "num_experts", "offsets", "order", "pairs", "slots", "tile_expert", "tile_row", "tiles")

    def __init__(self, expert_index, num_experts: int, height: int):
        flat = expert_index.reshape(-1)
        # a 16-bit key halves the passes of the device's radix sort
        key = flat.to(torch.int16) if num_experts < 2**15 - 1 else flat
        key, order = torch.sort(key, stable=True)
        bounds = torch.arange(num_experts + 1, device=flat.device, dtype=key.dtype)
        self.slots, self.pairs, self.num_experts, self.height = (
            expert_index.shape[1],
            flat.shape[0],
            num_experts,
            height,
        )
        self.order = order.to(torch.int32)
        self.offsets = torch.searchsorted(key, bounds, out_int32=True)
        # every expert with rows adds at most one tile that is not full
        self.tiles = self.pairs // height + min(num_experts, self.pairs)
        self.tile_expert = torch.empty(self.tiles, dtype=torch.int32, device=flat.device)
        self.tile_row = torch.empty_like(self.tile_expert)
        _fill_tiles[(num_experts + 1,)](
            self.offsets,
            self.tile_expert,
            self.tile_row,
            self.tiles,
            num_experts,
            HEIGHT=height,
            EXPERTS=triton.next_power_of_2(num_experts),
            BLOCK=128,
        )


def tile_height(pairs: int, num_experts: int) -> int:
    """Rows of a full tile from what the host knows, the mean rows per expert.

    Twice the mean, so that a usual expert is one tile and a crowded one reads its weights rarely; a tile that has
    fewer rows left runs at a half or a quarter of the height, so the choice does not cost a small expert.
    """
    return max(16, min(MAX_HEIGHT, triton.next_power_of_2(max(1, 2 * pairs // max(1, num_experts)))))


@triton.jit(do_not_specialize=["tiles", "num_experts"])
def _fill_tiles(
    OFFSETS,
    TILE_EXPERT,
    TILE_ROW,
    tiles,
    num_experts,
    HEIGHT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program `e` writes the tiles of expert `e`; the last program marks the tiles that nobody uses."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    known = every < num_experts
    first = tl.load(OFFSETS + every, mask=known, other=0)
    last = tl.load(OFFSETS + every + 1, mask=known, other=0)
    needed = (last - first + HEIGHT - 1) // HEIGHT
    begin = tl.sum(tl.where(every < expert, needed, 0), axis=0)
    own = tl.sum(tl.where(every == expert, needed, 0), axis=0)
    row = tl.sum(tl.where(every == expert, first, 0), axis=0)
    count = tl.where(expert == num_experts, tiles - begin, own)
    for start in range(0, count, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < count
        tl.store(TILE_EXPERT + begin + tile, tl.zeros((BLOCK,), tl.int32) + expert, mask=inside)
        tl.store(TILE_ROW + begin + tile, row + tile * HEIGHT, mask=inside)

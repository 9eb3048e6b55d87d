"""Maps over pictures: where beta is high, what is attended to, and what a pruning keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .analyze_measure import TYPES, score_tokens
from .benchmark_report import BenchmarkError, figure
from .calibration_data import CalibrationItem
from .calibration_passes import CalibrationInputs


Row = dict[str, Any]
# Frames of a clip that are drawn, spread over it.
FRAMES = 4
COLUMNS = ("beta", "received", "emb row")
_TITLES = {"beta": "beta", "received": "attention received", "emb row": "<emb> row"}


@dataclass
class HeatMap:
    """
    One picture, or some frames of a clip, as the model sees it.

    Args:
        item (`int`): index of the item.
        kind (`str`): `"image"` or `"video"`.
        frames (`np.ndarray` of shape `(frames, height, width, 3)`): in 0..1.
        scores (`dict[str, np.ndarray]`): `(frames, rows, columns)` each, one value for each token.
        kept (`np.ndarray` of shape `(frames, rows, columns)`): bool, the better half by beta.
    """

    item: int
    kind: str
    frames: np.ndarray
    scores: dict[str, np.ndarray]
    kept: np.ndarray


def unpatched(patches: Tensor, grid: Sequence[int], processor: Any) -> np.ndarray:
    """
    Pixels from the vision tower's patches: the inverse of `patches_moemb.patchify`.

    Args:
        patches (`torch.Tensor` of shape `(patches, patch_dim)`): of one image or clip.
        grid (`Sequence[int]`): its temporal, height and width patches.
        processor (`Any`): the image or video processor, for sizes, mean and deviation.

    Returns:
        `np.ndarray` of shape `(frames, height, width, 3)`: in 0..1; the first frame of each temporal patch.
    """
    steps, height, width = map(int, grid)
    side, depth, merge = processor.patch_size, processor.temporal_patch_size, processor.merge_size
    x = patches.float().cpu().view(steps, height // merge, width // merge, merge, merge, 3, depth, side, side)
    x = x[..., 0, :, :].permute(0, 1, 3, 6, 2, 4, 7, 5).reshape(steps, height * side, width * side, 3)
    pixels = x * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return pixels.clamp(0, 1).numpy()


def heat_map(inputs: CalibrationInputs, index: int, layer: int) -> HeatMap | None:
    """
    The map of an item's first picture or clip; `None` when it has none.

    Args:
        inputs ([`CalibrationInputs`]): model and items.
        index (`int`): of the item.
        layer (`int`): blocks that are looked at: beta is their mean, attention that of the last one of them that has
            any, or else of the first one after.
    """
    scores = score_tokens(inputs, [inputs.items[index]])
    features = scores.features
    found = [kind for kind in ("image", "video") if f"{kind}_grid_thw" in features]
    if not found:
        return None
    kind = found[0]
    suffix = "" if kind == "image" else "_videos"
    stock = inputs.processor.image_processor if kind == "image" else inputs.processor.video_processor
    grid = features[f"{kind}_grid_thw"][0].tolist()
    frames = unpatched(features[f"pixel_values{suffix}"][: int(np.prod(grid))], grid, stock)
    steps, rows, columns = grid[0], grid[1] // stock.merge_size, grid[2] // stock.merge_size
    tokens = (scores.types == TYPES.index(kind)).nonzero().squeeze(1)[: steps * rows * columns]
    attention = list(scores.received)
    block = max((number for number in attention if number < layer), default=attention[0])
    values = {"beta": scores.beta_before(layer), "received": scores.received[block], "emb row": scores.emb_row[block]}
    order = values["beta"][tokens].argsort(descending=True, stable=True)
    kept = np.zeros(len(tokens), dtype=bool)
    kept[order[: -(-len(tokens) // 2)].numpy()] = True
    chosen = np.unique(np.linspace(0, steps - 1, min(steps, FRAMES)).round().astype(int))
    maps = {name: value[tokens].view(steps, rows, columns).numpy()[chosen] for name, value in values.items()}
    return HeatMap(index, kind, frames[chosen], maps, kept.reshape(steps, rows, columns)[chosen])


def items_with_pictures(items: Sequence[CalibrationItem], most: int) -> list[int]:
    """Indices of items with a picture or a clip, spread over all of them, clips among them when there are any."""

    def parts(item: CalibrationItem) -> set[str]:
        return set(item.value) & {"image", "video"} if isinstance(item.value, dict) else set()

    clips = [index for index, item in enumerate(items) if "video" in parts(item)]
    pictures = [index for index, item in enumerate(items) if parts(item) == {"image"}]
    few = min(len(clips), max(most // 3, most - len(pictures)))
    return [*_spread(pictures, most - few), *_spread(clips, few)]


def _spread(values: list[int], count: int) -> list[int]:
    count = min(count, len(values))
    return [values[place * len(values) // count] for place in range(count)]


def map_rows(maps: Sequence[HeatMap]) -> list[Row]:
    """One row for each token of each map."""
    rows = []
    for found in maps:
        for place in np.ndindex(found.kept.shape):
            values = {name: float(found.scores[name][place]) for name in COLUMNS}
            where = dict(zip(("frame", "row", "column"), map(int, place), strict=True))
            rows.append({"item": found.item, "kind": found.kind, **where, **values, "kept": int(found.kept[place])})
    return rows


def draw_maps(maps: Sequence[HeatMap], layer: int):
    """One line for each item: the picture, three maps over it, and what a pruning to one half keeps."""
    if not maps:
        raise BenchmarkError("there are no maps to draw")
    drawing, _ = figure(1)
    drawing.clear()
    pictures = [_side_by_side(found.frames) for found in maps]
    heights = [0.3 + 2.1 * picture.shape[0] / picture.shape[1] for picture in pictures]
    drawing.set_size_inches(11, 0.5 + sum(heights))
    grid = drawing.subplots(len(maps), 2 + len(COLUMNS), squeeze=False, height_ratios=heights)
    titles = ["as the model sees it", *(_TITLES[name] for name in COLUMNS), "kept: better half by beta"]
    for line, found, picture in zip(grid, maps, pictures, strict=True):
        grey = np.repeat(picture.mean(axis=-1, keepdims=True), 3, axis=-1)
        extent = (0, picture.shape[1], picture.shape[0], 0)
        line[0].imshow(picture, extent=extent)
        line[0].set_ylabel(f"item {found.item}", fontsize=8)
        for axis, name in zip(line[1:-1], COLUMNS, strict=True):
            values = _side_by_side(found.scores[name][..., None])[..., 0]
            axis.imshow(grey, extent=extent)
            axis.imshow(values, extent=extent, cmap="inferno", alpha=0.65, interpolation="nearest")
            axis.set_xlabel(f"{values.min():.3g} to {values.max():.3g}", fontsize=7)
        kept = _side_by_side(found.kept[..., None].astype(float))
        rows = picture.shape[0] // kept.shape[0]
        mask = kept.repeat(rows, axis=0).repeat(picture.shape[1] // kept.shape[1], axis=1)
        line[-1].imshow(picture * mask + 0.85 * (1 - mask), extent=extent)
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in grid.flatten():
        axis.set_xticks([])
        axis.set_yticks([])
    drawing.suptitle(f"first {layer} blocks; brighter is more, scaled in each map", fontsize=10)
    return drawing


def _side_by_side(frames: np.ndarray) -> np.ndarray:
    """`(frames, height, width, channels)` to one picture, frames from left to right."""
    return np.concatenate(list(frames), axis=1)


__all__ = ["HeatMap", "draw_maps", "heat_map", "items_with_pictures", "map_rows"]

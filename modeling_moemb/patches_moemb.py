"""From uint8 pictures to the vision tower's patches: the arithmetic of the Qwen3-VL processors, one batch per size.

Pictures of one size are stacked and cut together, so a few hundred small images cost milliseconds. The numbers equal
those of `Qwen2VLImageProcessor` and `Qwen3VLVideoProcessor`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as image_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_size

from .media_moemb import MediaError


def patchify(
    frames: np.ndarray | torch.Tensor,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    rescale_factor: float = 1 / 255,
) -> torch.Tensor:
    """
    Cuts pictures of one size into normalised patches.

    Args:
        frames (`np.ndarray` or `torch.Tensor`):
            uint8 `[n, H, W, 3]` (images) or `[n, T, H, W, 3]` (clips). `H` and `W` are multiples of
            `patch_size * merge_size`. An image is repeated, a clip filled up with its last frame, to a multiple of
            `temporal_patch_size`.
        patch_size (`int`): side of a patch in pixels.
        temporal_patch_size (`int`): frames of a patch.
        merge_size (`int`): side, in patches, of the block that becomes one token.
        mean (`Sequence[float]`, *optional*, defaults to 0.5 each): mean per channel, of values in [0, 1].
        std (`Sequence[float]`, *optional*, defaults to 0.5 each): deviation per channel.
        rescale_factor (`float`, *optional*, defaults to 1/255): what makes [0, 1] of the pixel values.

    Returns:
        `torch.Tensor`: float32 `[n, t * h * w, 3 * temporal_patch_size * patch_size ** 2]`, patches in the merger's
        order (each `merge_size` x `merge_size` block in a row), values within a patch ordered channel, frame, row,
        column.

    Raises:
        ValueError: a side is no multiple of `patch_size * merge_size`.
    """
    x = torch.as_tensor(frames)
    if x.ndim == 4:
        x = x[:, None]
    n, length, height, width, channels = x.shape
    p, t, m = patch_size, temporal_patch_size, merge_size
    if height % (p * m) or width % (p * m):
        raise ValueError(
            f"a picture of {width}x{height} px does not cut into {p} px patches merged {m}x{m}: "
            f"both sides must be multiples of {p * m} px"
        )
    # A still picture is cut once and repeated afterwards.
    depth = 1 if length == 1 else t
    if fill := -length % depth:
        x = torch.cat([x, x[:, -1:].expand(-1, fill, -1, -1, -1)], dim=1)
    steps = x.shape[1] // depth
    x = x.reshape(n, steps, depth, height // (p * m), m, p, width // (p * m), m, p, channels)
    x = x.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    tokens = steps * (height // p) * (width // p)
    x = x.reshape(n, tokens, channels, depth, p * p).to(torch.float32)
    x = x.sub_(_per_channel(mean, rescale_factor)).div_(_per_channel(std, rescale_factor))
    return x.expand(-1, -1, -1, t, -1).reshape(n, tokens, channels * t * p * p)


def _per_channel(values: Sequence[float], rescale_factor: float) -> torch.Tensor:
    return (torch.tensor(values) * (1.0 / rescale_factor)).view(-1, 1, 1)


class PatchCutter:
    """
    Resizes and cuts images and clips as the stock image and video processors do, sizes grouped.

    Args:
        image_processor (`Qwen2VLImageProcessor`): its settings are read at every call.
        video_processor (`Qwen3VLVideoProcessor`): likewise.
        min_pixels (`int`, *optional*): overrides the least area of an image, in pixels.
        max_pixels (`int`, *optional*): overrides the largest area of an image, in pixels.
    """

    def __init__(
        self, image_processor: Any, video_processor: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ):
        self.image_processor, self.video_processor = image_processor, video_processor
        self.image_bounds = pixel_bounds(image_processor)
        if min_pixels is not None or max_pixels is not None:
            low, high = self.image_bounds
            self.image_bounds = (
                min_pixels or min(low, max_pixels or low),
                max_pixels or max(high, min_pixels or high),
            )
        if self.image_bounds[0] > self.image_bounds[1]:
            raise ValueError(f"min_pixels={self.image_bounds[0]} is above max_pixels={self.image_bounds[1]}")

    def image_grid(self, height: int, width: int) -> tuple[int, int, int]:
        """
        Args:
            height (`int`): pixels.
            width (`int`): pixels.

        Returns:
            `tuple[int, int, int]`: frames, rows and columns of patches.

        Raises:
            MediaError: one side is more than 200 times the other.
        """
        stock = self.image_processor
        factor = stock.patch_size * stock.merge_size
        low, high = self.image_bounds
        try:
            new_height, new_width = image_size(height, width, factor, min_pixels=low, max_pixels=high)
        except ValueError as error:
            raise MediaError(f"an image of {width}x{height} px cannot be resized: {error}; crop or pad it") from error
        return 1, new_height // stock.patch_size, new_width // stock.patch_size

    def clip_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """The same for a clip of `frames` frames."""
        stock = self.video_processor
        length = max(frames, stock.temporal_patch_size)
        factor = stock.patch_size * stock.merge_size
        low, high = pixel_bounds(stock)
        if stock.cap_pixels_per_frame:
            frame_cap = stock.max_video_tokens * factor * factor
            high = max(min(frame_cap, high // length), int(low * 1.05)) * length
        try:
            new_height, new_width = video_size(
                length, height, width, stock.temporal_patch_size, factor, min_pixels=low, max_pixels=high
            )
        except ValueError as error:
            raise MediaError(f"a video of {width}x{height} px cannot be resized: {error}; crop or pad it") from error
        return -(-length // stock.temporal_patch_size), new_height // stock.patch_size, new_width // stock.patch_size

    def cut_images(self, images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            images (`list[np.ndarray]`): uint8 `[H, W, 3]` each, at least one.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `pixel_values` float32 `[patches, patch values]` in the order of the
            images, and `image_grid_thw` int64 `[images, 3]`.
        """
        grids = [self.image_grid(*image.shape[:2]) for image in images]
        return self._cut([image[None] for image in images], grids, self.image_processor), torch.tensor(grids)

    def cut_clips(self, clips: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            clips (`list[np.ndarray]`): uint8 `[T, H, W, 3]` each, at least one.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `pixel_values_videos` float32 and `video_grid_thw` int64, likewise.
        """
        least = self.video_processor.temporal_patch_size
        # The stock processor refuses a clip shorter than one temporal patch; such a clip is a still.
        clips = [
            clip if len(clip) >= least else np.concatenate([clip] + [clip[-1:]] * (least - len(clip)))
            for clip in clips
        ]
        grids = [self.clip_grid(*clip.shape[:3]) for clip in clips]
        return self._cut(clips, grids, self.video_processor), torch.tensor(grids)

    def _cut(self, stacks: list[np.ndarray], grids: list[tuple[int, int, int]], stock: Any) -> torch.Tensor:
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, frames in enumerate(stacks):
            groups.setdefault(frames.shape, []).append(index)
        counts = np.array([t * h * w for t, h, w in grids])
        starts = np.cumsum(counts) - counts
        values = 3 * stock.temporal_patch_size * stock.patch_size**2
        out = torch.empty(int(counts.sum()), values) if len(groups) > 1 else None
        for members in groups.values():
            pixels = torch.from_numpy(np.stack([stacks[index] for index in members]))
            height, width = (side * stock.patch_size for side in grids[members[0]][1:])
            if pixels.shape[2:4] != (height, width):
                pixels = self._resize(pixels, height, width, stock)
            patches = self._patches(pixels, stock)
            if out is None:
                return patches.flatten(0, 1)
            for index, block in zip(members, patches, strict=True):
                out[starts[index] : starts[index] + counts[index]] = block
        return out

    def _resize(self, pixels: torch.Tensor, height: int, width: int, stock: Any) -> torch.Tensor:
        """uint8 `[n, T, H, W, 3]` to the given size, with the stock interpolation (bicubic, antialiased)."""
        n, length = pixels.shape[:2]
        stacked = pixels.flatten(0, 1).permute(0, 3, 1, 2)
        # The class above the Qwen one resizes to a fixed size; the Qwen one would choose the size again.
        resize = super(_qwen_class(type(stock)), stock).resize
        resized = resize(image=stacked, size=SizeDict(height=height, width=width), resample=stock.resample)
        return resized.permute(0, 2, 3, 1).unflatten(0, (n, length))

    def _patches(self, pixels: torch.Tensor, stock: Any) -> torch.Tensor:
        mean = stock.image_mean if stock.do_normalize else (0.0, 0.0, 0.0)
        std = stock.image_std if stock.do_normalize else (1.0, 1.0, 1.0)
        scale = stock.rescale_factor if stock.do_rescale else 1.0
        return patchify(pixels, stock.patch_size, stock.temporal_patch_size, stock.merge_size, mean, std, scale)


def pixel_bounds(stock: Any) -> tuple[int, int]:
    """Returns the least and the largest area, in pixels, of an image or (summed over frames) a video."""
    size = stock.size if isinstance(stock.size, dict) else dict(stock.size)
    return int(size["shortest_edge"]), int(size["longest_edge"])


def _qwen_class(cls: type) -> type:
    return next(base for base in cls.__mro__ if "resize" in vars(base))

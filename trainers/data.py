"""From raw items (texts, uint8 images and clips) to the model's inputs, vectorised for the training loop.

The processor of a MoEMB repository does the same for a user's items, with all its care for file formats. Here every
item is already an array of the right size, so patches are one reshape per shape of picture, and a batch of a few
hundred items costs milliseconds. `tests/trainers/test_data.py` holds the two equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from modeling_moemb.patches_moemb import patchify

from .tokenizer import EMB, IM_END, IMAGE_PAD, PAD, VIDEO_PAD, VISION_END, VISION_START


# Frame rate that a clip given as bare frames is taken to have (sets the timestamps in its layout).
CLIP_FPS = 24.0
# Rows of padding tokens that `BatchEncoder(token_multiple=...)` appends to a batch.
FILLER_ROWS = 8

Part = str | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One item to embed, or one document to model.

    Args:
        parts (`tuple[Part, ...]`):
            In order: a text (`str`), an image (uint8 `[H, W, 3]`) or a clip (uint8 `[T, H, W, 3]`).
        instruction (`str`, *optional*, defaults to `""`): Stands before the content, closed by `<|im_end|>`.
    """

    parts: tuple[Part, ...]
    instruction: str = ""


@dataclass
class PictureShape:
    """How the vision tower cuts pictures: sizes in pixels, frames and patches."""

    patch_size: int = 8
    temporal_patch_size: int = 2
    merge_size: int = 2


@dataclass
class _Pictures:
    """Pictures of one kind (images or clips) in the order in which they stand in the batch."""

    arrays: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Strong, vectorised image augmentation: turn, scale, stretch, shift, colour, brightness, grey.

    Pictures are turned by up to 14 degrees, scaled by 0.75 to 1.2, stretched by up to 15 %, shifted by up to 12 %,
    each colour channel scaled by 0.75 to 1.25 and the whole by 0.8 to 1.15 (of the ink on white), and 12 % become
    grey. Mirroring is left out: "left arrow" must stay left.

    Args:
        images (`torch.Tensor`): uint8 `[n, H, W, 3]` on a white ground.
        generator (`torch.Generator`): Source of the draws, so that a step can be repeated exactly.

    Returns:
        `torch.Tensor`: uint8 `[n, H, W, 3]`.
    """
    n = len(images)
    if n == 0:
        return images

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator)

    # On inverted colours the padding of grid_sample (zeros) is the white ground.
    ink = 255.0 - images.permute(0, 3, 1, 2).float()
    angle, scale, stretch = (uniform(n) - 0.5) * 0.5, 0.85 + uniform(n) * 0.5, 1 + (uniform(n) - 0.5) * 0.3
    shift = (uniform(n, 2) - 0.5) * 0.24
    top = torch.stack([scale * angle.cos(), -scale * angle.sin(), shift[:, 0]], dim=1)
    bottom = torch.stack([scale * stretch * angle.sin(), scale * stretch * angle.cos(), shift[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([top, bottom], dim=1), list(ink.shape), align_corners=False)
    ink = F.grid_sample(ink, grid, align_corners=False)
    ink = ink * (0.75 + 0.5 * uniform(n, 3, 1, 1)) * (0.8 + 0.35 * uniform(n, 1, 1, 1))
    grey = uniform(n, 1, 1, 1) < 0.12
    ink = torch.where(grey, ink.mean(dim=1, keepdim=True), ink)
    return (255.0 - ink).clamp_(0, 255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class BatchEncoder:
    """Encodes samples as packed model inputs: the training-time twin of the processor.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): With MoEMB's special tokens.
        shape (`PictureShape`, *optional*): How pictures are cut.
        max_text_tokens (`int`, *optional*, defaults to 192): A longer text part is cut at its end.
        token_multiple (`int`, *optional*, defaults to 0):
            When set, each batch gets `FILLER_ROWS` more rows of padding tokens at its end, so that its token count is
            a multiple of this. oneDNN compiles a matrix product for every new row count, which takes ten times as
            long as running it: with few distinct counts nearly every product is found compiled.
    """

    def __init__(
        self, tokenizer, shape: PictureShape | None = None, max_text_tokens: int = 192, token_multiple: int = 0
    ):
        self.shape = shape or PictureShape()
        self.max_text_tokens = max_text_tokens
        self.token_multiple = token_multiple
        self._backend = tokenizer.backend_tokenizer
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (EMB, IM_END, IMAGE_PAD, PAD, VIDEO_PAD)}
        self.emb_id, self.im_end_id, self.pad_id = ids[EMB], ids[IM_END], ids[PAD]
        self.image_id, self.video_id = ids[IMAGE_PAD], ids[VIDEO_PAD]
        self.vision_start_id, self.vision_end_id = tokenizer.convert_tokens_to_ids([VISION_START, VISION_END])
        self._text_ids: dict[str, list[int]] = {}

    def __call__(self, samples: Sequence[Sample], final_token: str = EMB) -> dict[str, torch.Tensor]:
        """Builds one batch.

        Args:
            samples (`Sequence[Sample]`): The items.
            final_token (`str`, *optional*, defaults to `<emb>`): Token that closes each row.

        Returns:
            `dict[str, torch.Tensor]`: `input_ids` int64 `[1, N]`, all rows one after the other, with their bounds
            `cu_seq_lens_q` int32 `[B + 1]`, and, where there are such items, `pixel_values` float32
            `[patches, 3 * temporal_patch_size * patch_size ** 2]` with `image_grid_thw` int64 `[images, 3]`, and
            `pixel_values_videos` with `video_grid_thw`.
        """
        self._tokenize({text for sample in samples for text in (sample.instruction, *sample.parts) if _is_text(text)})
        images, clips = _Pictures(), _Pictures()
        final = self.emb_id if final_token == EMB else self.pad_id
        rows = [[*self._row(sample, images, clips), final] for sample in samples]
        if self.token_multiple:
            rows += self._filler(sum(map(len, rows)), final)
        bounds = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        batch = {
            "input_ids": torch.tensor([[token for row in rows for token in row]]),
            "cu_seq_lens_q": torch.from_numpy(bounds),
        }
        for pictures, values, grid in (
            (images, "pixel_values", "image_grid_thw"),
            (clips, "pixel_values_videos", "video_grid_thw"),
        ):
            if pictures.arrays:
                batch[values] = self._patches(pictures)
                batch[grid] = torch.tensor(pictures.grids)
        return batch

    def _tokenize(self, texts: set[str]) -> None:
        """Fills the cache: labels and tags come back step after step."""
        new = [text for text in texts if text not in self._text_ids]
        if len(self._text_ids) + len(new) > 400_000:
            self._text_ids.clear()
            new = list(texts)
        for text, encoding in zip(new, self._backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._text_ids[text] = encoding.ids[: self.max_text_tokens]

    def _filler(self, tokens: int, final: int) -> list[list[int]]:
        """Rows that bring `tokens` to a multiple; a fixed number of them, so that the number of rows is steady too."""
        missing = -(tokens + FILLER_ROWS) % self.token_multiple
        sizes = [missing // FILLER_ROWS + (i < missing % FILLER_ROWS) for i in range(FILLER_ROWS)]
        return [[*[self.pad_id] * size, final] for size in sizes]

    def _row(self, sample: Sample, images: _Pictures, clips: _Pictures) -> list[int]:
        row: list[int] = []
        if sample.instruction:
            row += [*self._text_ids[sample.instruction], self.im_end_id]
        for part in sample.parts:
            if isinstance(part, str):
                row += self._text_ids[part]
            elif part.ndim == 3:
                tokens = self._add(images, part[None])
                row += [self.vision_start_id, *[self.image_id] * tokens, self.vision_end_id]
            elif part.ndim == 4:
                row += self._clip(part, clips)
            else:
                raise ValueError(
                    f"A part must be a text, an image [H, W, 3] or a clip [T, H, W, 3], not {part.shape}."
                )
        return row

    def _clip(self, clip: np.ndarray, clips: _Pictures) -> list[int]:
        """One timestamp and one block of pads per temporal patch, as Qwen3.5 lays a video out."""
        tokens = self._add(clips, clip)
        step = self.shape.temporal_patch_size
        row: list[int] = []
        for stamp in clip_timestamps(len(clip), step):
            self._tokenize({stamp})
            row += [
                *self._text_ids[stamp],
                self.vision_start_id,
                *[self.video_id] * (tokens // clips.grids[-1][0]),
                self.vision_end_id,
            ]
        return row

    def _add(self, pictures: _Pictures, frames: np.ndarray) -> int:
        """Records a picture; returns how many tokens it becomes."""
        length, height, width, _ = frames.shape
        grid = (
            -(-length // self.shape.temporal_patch_size),
            height // self.shape.patch_size,
            width // self.shape.patch_size,
        )
        pictures.arrays.append(frames)
        pictures.grids.append(grid)
        return grid[0] * grid[1] * grid[2] // self.shape.merge_size**2

    def _patches(self, pictures: _Pictures) -> torch.Tensor:
        """Patches of all pictures in batch order; one `patchify` per distinct picture size."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, frames in enumerate(pictures.arrays):
            by_shape.setdefault(tuple(frames.shape), []).append(index)
        counts = np.array([t * h * w for t, h, w in pictures.grids])
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        cut, out = self.shape, None
        for indices in by_shape.values():
            stacked = torch.from_numpy(np.stack([np.asarray(pictures.arrays[i]) for i in indices]))
            patches = patchify(stacked, cut.patch_size, cut.temporal_patch_size, cut.merge_size)
            if len(by_shape) == 1:
                return patches.flatten(0, 1)
            if out is None:
                out = torch.empty(int(counts.sum()), patches.shape[-1])
            rows = torch.from_numpy(starts[indices][:, None] + np.arange(patches.shape[1])[None])
            out[rows.flatten()] = patches.flatten(0, 1)
        return out


def clip_timestamps(frames: int, temporal_patch_size: int, fps: float = CLIP_FPS) -> list[str]:
    """The timestamp text of each temporal patch: the mean time of its frames, as Qwen3.5's processor writes it."""
    times = [index / fps for index in range(frames)]
    times += [times[-1]] * (-frames % temporal_patch_size)
    means = [(times[i] + times[i + temporal_patch_size - 1]) / 2 for i in range(0, len(times), temporal_patch_size)]
    return [f"<{mean:.1f} seconds>" for mean in means]


def _is_text(part: Part) -> bool:
    return isinstance(part, str)

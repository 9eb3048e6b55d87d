"""Hand-made model inputs: items as token lists with their pixels, collated with padding on either side."""

from dataclasses import dataclass, field

import torch

from ..conftest import EMB_ID, IMAGE_ID, PATCH_DIM, TEXT_IDS, VIDEO_ID, VISION_END_ID, VISION_START_ID


@dataclass
class Item:
    ids: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    image_pixels: list[torch.Tensor] = field(default_factory=list)
    video_pixels: list[torch.Tensor] = field(default_factory=list)

    def text(self, count: int) -> "Item":
        self.ids += torch.randint(0, TEXT_IDS, (count,)).tolist()
        return self

    def image(self, height: int, width: int) -> "Item":
        self.images.append((1, height, width))
        self.image_pixels.append(torch.randn(height * width, PATCH_DIM))
        self.ids += [VISION_START_ID, *[IMAGE_ID] * (height * width // 4), VISION_END_ID]
        return self

    def video(self, frames: int, height: int, width: int) -> "Item":
        self.videos.append((frames, height, width))
        self.video_pixels.append(torch.randn(frames * height * width, PATCH_DIM))
        for _ in range(frames):
            self.text(2)
            self.ids += [VISION_START_ID, *[VIDEO_ID] * (height * width // 4), VISION_END_ID]
        return self

    def emb(self) -> "Item":
        self.ids.append(EMB_ID)
        return self


def mixed_items() -> list[Item]:
    """Text, one image, several images, text and images in order, video, everything at once, and one token."""
    return [
        Item().text(7).emb(),
        Item().image(8, 8).emb(),
        Item().image(4, 4).image(4, 12).image(8, 4).emb(),
        Item().text(5).image(4, 8).text(3).image(8, 8).text(2).emb(),
        Item().video(3, 4, 4).emb(),
        Item().text(2).video(2, 8, 4).text(4).image(4, 4).video(1, 4, 8).text(1).emb(),
        Item().emb(),
        Item().text(150).emb(),
    ]


def collate(items: list[Item], side: str = "right") -> dict[str, torch.Tensor]:
    """Model inputs as the processor makes them."""
    width = max(len(item.ids) for item in items)
    input_ids = torch.zeros(len(items), width, dtype=torch.long)
    attention_mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, item in enumerate(items):
        start = 0 if side == "right" else width - len(item.ids)
        input_ids[row, start : start + len(item.ids)] = torch.tensor(item.ids)
        attention_mask[row, start : start + len(item.ids)] = 1
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "mm_token_type_ids": (input_ids == IMAGE_ID).long() + 2 * (input_ids == VIDEO_ID).long(),
    }
    for pixels, grid, entries, name in (
        ("pixel_values", "image_grid_thw", "images", "image_pixels"),
        ("pixel_values_videos", "video_grid_thw", "videos", "video_pixels"),
    ):
        grids = [entry for item in items for entry in getattr(item, entries)]
        if grids:
            batch[grid] = torch.tensor(grids)
            batch[pixels] = torch.cat([entry for item in items for entry in getattr(item, name)])
    return batch


def flatten(items: list[Item]) -> dict[str, torch.Tensor]:
    """The same items as one row without padding, with their boundaries."""
    batch = collate(items)
    ids = [token for item in items for token in item.ids]
    lengths = torch.tensor([0] + [len(item.ids) for item in items])
    batch["input_ids"] = torch.tensor(ids)[None]
    batch["cu_seq_lens_q"] = lengths.cumsum(0).to(torch.int32)
    del batch["attention_mask"], batch["mm_token_type_ids"]
    return batch

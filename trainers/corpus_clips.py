"""Real animations of emoji, cut to eight frames."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from .corpus_records import code_point_key
from .corpus_render import CLIP_FRAMES, on_white
from .corpus_sources import read_members


def read_animations(archive: Path, concepts: dict[str, dict]) -> tuple[np.ndarray, list[dict]]:
    """Animated emoji of base concepts, sampled evenly from the first to the last frame.

    Args:
        archive (`Path`):
            The `@lobehub/fluent-emoji-anim-1` package: animated WebP named by code points.
        concepts (`dict[str, dict]`):
            The concepts; files of others, of skin variants, or of fewer than eight frames are passed over.

    Returns:
        `tuple[np.ndarray, list[dict]]`: clips `(m, 8, 64, 64, 3)` uint8 and their rows `key`, `source`, `concept`,
        `text`, `split` (always `"evaluation"`: they are the twins, in three dimensions, of a training artist's
        drawings).
    """
    bases = {key for key, concept in concepts.items() if concept["base"] is None}
    members = read_members(archive, lambda name: name.endswith(".webp") and code_point_key(Path(name).stem) in bases)
    clips, rows = [], []
    for name in tqdm(sorted(members), desc="animations", unit="clip"):
        with Image.open(io.BytesIO(members[name])) as animation:
            count = getattr(animation, "n_frames", 1)
            if count < CLIP_FRAMES:
                continue
            frames = []
            for number in np.linspace(0, count - 1, CLIP_FRAMES).round().astype(int):
                animation.seek(int(number))
                frames.append(on_white(animation))
        concept = code_point_key(Path(name).stem)
        clips.append(np.stack(frames))
        text = concepts[concept]["en"]
        rows.append(
            {
                "key": f"fluent-animated/{concept}",
                "source": "animations",
                "concept": concept,
                "text": text,
                "split": "evaluation",
            }
        )
    return np.stack(clips), rows

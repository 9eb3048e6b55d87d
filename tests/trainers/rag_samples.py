"""Files to index, made on the spot, and an embedder whose vectors can be foretold."""

import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

from modeling_moemb.video_moemb import FrameSampling, load_video


RED, GREEN, BLUE = (220, 30, 30), (30, 180, 60), (40, 60, 220)
DIMENSION = 16


def picture(colour, size=(64, 48)) -> Image.Image:
    return Image.new("RGB", size, colour)


def png(colour, size=(64, 48)) -> bytes:
    buffer = io.BytesIO()
    picture(colour, size).save(buffer, "PNG")
    return buffer.getvalue()


def pdf(pages: list[str]) -> bytes:
    """A PDF with one line of text on each page, written by hand."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 24 Tf 40 700 Td ({text}) Tj ET"
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * number} 0 R >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>"
    )
    return body + f"{end}\nstartxref\n{len(body)}\n%%EOF\n".encode()


def write_video(path: Path, colours: list, seconds: float = 1.0, rate: int = 8) -> None:
    """A video that shows each colour for `seconds`."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for colour in colours:
            for _ in range(round(seconds * rate)):
                container.mux(stream.encode(av.VideoFrame.from_image(picture(colour))))
        container.mux(stream.encode())


def gif(colours: list) -> bytes:
    frames = [picture(colour) for colour in colours]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=200)
    return buffer.getvalue()


def vector_of(item) -> np.ndarray:
    """Float32 `[DIMENSION]` of unit length: the mean colour of what is seen, and a hash of what is read."""
    vector = np.zeros(DIMENSION, np.float32)
    item = {"text": item} if isinstance(item, str) else item
    if "image" in item:
        vector[:3] = np.asarray(item["image"], np.float32).reshape(-1, 3).mean(axis=0) / 255
    if "video" in item:
        vector[:3] = load_video(item["video"], FrameSampling(num_frames=4)).frames.reshape(-1, 3).mean(axis=0) / 255
    if "text" in item:
        digest = hashlib.sha256(item["text"].encode()).digest()
        vector[3:] = np.frombuffer(digest[: DIMENSION - 3], np.uint8).astype(np.float32) / 255
    return vector / np.linalg.norm(vector)


class FakeEncoder:
    """Has the face of `rag_encoder.Encoder` that the indexer sees, and remembers what it was asked."""

    sampling = FrameSampling(num_frames=4)

    def __init__(self, batch_size: int = 8):
        self.batch_size = batch_size
        self.batches: list[int] = []
        self.after = lambda: None

    @property
    def embedded(self) -> int:
        return sum(self.batches)

    def documents(self, items, budget=None) -> np.ndarray:
        self.batches.append(len(items))
        vectors = np.stack([vector_of(item) for item in items])
        self.after()
        return vectors


def fill(folder: Path) -> None:
    """One file of each kind."""
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "red.png").write_bytes(png(RED))
    (folder / "sub/green.png").write_bytes(png(GREEN))
    (folder / "moving.gif").write_bytes(gif([RED, BLUE]))
    (folder / "two.pdf").write_bytes(pdf(["apples and pears", "plums"]))
    (folder / "notes.md").write_text("# Notes\n\nThe harbour is frozen.\n", encoding="utf-8")
    write_video(folder / "clip.mp4", [GREEN, BLUE])


FACTS = {"model": "fake", "dimension": DIMENSION, "probe": np.eye(3, DIMENSION).tolist()}

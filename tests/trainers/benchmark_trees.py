"""Small benchmarks in the official layouts, and a model that sees colours, so that every score can be worked out."""

import io
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
from PIL import Image


RED, GREEN, BLUE, DARK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (40, 0, 0)
WORDS = ("red", "green", "blue")


class ColourModel:
    """Vectors are how often `red`, `green` and `blue` occur in the texts plus the mean colour of the pictures."""

    def __init__(self, prompts=None, evaluation=None, fail_after=None):
        self.prompts = {"query": "", "document": ""} if prompts is None else prompts
        self.default_prompt_name = None
        self.batches = []
        self.fail_after = fail_after
        config = SimpleNamespace(evaluation=evaluation, embedding=None, adaptive_compute=None)
        video = SimpleNamespace(num_frames=8, max_frames=8, fps=None)
        self._first = SimpleNamespace(
            model=SimpleNamespace(config=config), processor=SimpleNamespace(video_processor=video)
        )

    def __iter__(self):
        return iter([self._first])

    def encode(self, inputs, prompt=None, batch_size=32, show_progress_bar=False, **settings):
        if self.fail_after is not None and len(self.batches) >= self.fail_after:
            raise KeyboardInterrupt
        self.batches.append(SimpleNamespace(prompt=prompt, inputs=inputs, settings=settings))
        vectors = np.array([sum(map(self._part, item), np.full(4, 1e-3)) for item in inputs])
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    def _part(self, part):
        value = part[part["type"]]
        if part["type"] == "text":
            return np.array([value.lower().replace(chr(34), " ").split().count(word) for word in WORDS] + [0.0])
        frames = value["frames"] if part["type"] == "video" else [value]
        return np.mean([np.append(_pixels(frame).mean(axis=(0, 1)) / 255, 0.0) for frame in frames], axis=0)

    @property
    def items(self):
        return [item for batch in self.batches for item in batch.inputs]


def _pixels(frame):
    if isinstance(frame, (np.ndarray, Image.Image)):
        return np.asarray(frame).astype(float)
    source = io.BytesIO(frame) if isinstance(frame, bytes) else frame
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB"), dtype=float)


def picture(colour, path: Path | None = None, size=8):
    """A picture of one colour: written as PNG or JPEG, or returned as PNG bytes."""
    image = Image.new("RGB", (size, size), colour)
    if path is None:
        stream = io.BytesIO()
        image.save(stream, format="PNG")
        return stream.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def frames(folder: Path, colours, pattern="frame_{:d}.png"):
    """A folder of saved frames; names without leading zeros, so that their order is not the alphabet's."""
    for number, colour in enumerate(colours):
        picture(colour, folder / pattern.format(number + 1))


def table(path: Path, rows, **casts):
    """A Parquet file as a Hub data set has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = datasets.Dataset.from_list(rows)
    for column, feature in casts.items():
        made = made.cast_column(column.replace("_", " ") if column not in made.column_names else column, feature)
    made.to_parquet(path)


def image_row(instruction, text, picture_path, texts=None, target="", targets=None):
    return {
        "qry_inst": instruction, "qry_text": text, "qry_img_path": picture_path, "tgt_inst": target,
        "tgt_text": texts if texts is not None else [""], "tgt_img_path": targets if targets is not None else [""],
    }  # fmt: skip


def image_tree(root: Path) -> Path:
    """One task of each image reader."""
    tasks, pictures = root / "image-tasks", root / "image-tasks"
    for name, colour in {"red": RED, "green": GREEN, "blue": BLUE, "dark": DARK}.items():
        picture(colour, pictures / f"pics/{name}.png")
    classify = "<|image_1|> Represent the given image for classification"
    table(tasks / "HatefulMemes/test-00000-of-00001.parquet", [
        image_row(classify, "", "pics/red.png", ["red", "green", "blue"]),
        image_row(classify, "", "pics/green.png", ["blue", "green", "red"]),  # the right one is first: a miss
        image_row(classify, "", "pics/blue.png", ["blue", "red"]),
    ])  # fmt: skip
    ask, page = "Find me an image that matches the given caption:", "<|image_1|> Represent the given image."
    table(tasks / "MSCOCO_t2i/test-00000-of-00001.parquet", [
        image_row(ask, "a red thing", "", None, page, ["pics/red.png", "pics/green.png"]),
        image_row(ask, "a blue thing", "", None, page, ["pics/green.png", "pics/blue.png"]),
    ])  # fmt: skip
    table(tasks / "WebQA/test-00000-of-00001.parquet", [
        image_row(ask, "blue and blue", "", ["red red", "blue blue blue"], page, ["pics/dark.png", "pics/red.png"]),
    ])  # fmt: skip
    match = "<|image_1|> Select the portion of the image that follows the language expressions:"
    table(tasks / "RefCOCO-Matching/test-00000-of-00001.parquet", [
        image_row(match, "green", "pics/dark.png", ['"green"', '"red"'], page, ["pics/dark.png", "pics/dark.png"]),
    ])  # fmt: skip
    return root


def beir(folder: Path, queries, corpus, judged, split="test", language=None):
    """The three tables of a visual document task."""
    asked = [{"query-id": number, "query": text} for number, text in enumerate(queries)]
    if language:
        asked = [row | {"language": name} for row, name in zip(asked, language, strict=True)]
    table(folder / f"queries/{split}-00000-of-00001.parquet", asked)
    pages = [{"corpus-id": name, "image": {"bytes": picture(colour), "path": None}} for name, colour in corpus.items()]
    made = datasets.Dataset.from_list(pages).cast_column("image", datasets.Image(decode=False))
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    made.to_parquet(folder / f"corpus/{split}-00000-of-00001.parquet")
    table(folder / f"qrels/{split}-00000-of-00001.parquet", [
        {"query-id": query, "corpus-id": page, "score": score} for query, page, score in judged
    ])  # fmt: skip


def page_tree(root: Path) -> Path:
    """A ViDoRe task with graded relevance, one with languages, and a VisRAG task with unpacked pages."""
    docs = root / "visdoc-tasks"
    beir(
        docs / "docvqa_test_subsampled_beir", ["green green", "red"],
        {"1": RED, "2": GREEN, "3": (120, 200, 0), "4": BLUE},
        # Query 0 ranks 2, 3, 1, 4; its best order is 3 (relevance 2), 2 (relevance 1).
        [(0, "2", 1), (0, "3", 2), (0, "4", 0), (1, "1", 1)],
    )  # fmt: skip
    beir(
        docs / "esg_reports_v2", ["red", "rouge", "blue"], {"7": RED, "8": BLUE},
        [(0, "7", 1), (1, "7", 1), (2, "8", 1)], language=["english", "french", "english"],
    )  # fmt: skip
    name = "x" * 60 + ".jpg"
    beir(docs / "VisRAG-Ret-Test-ChartQA", ["blue"], {name: RED, "b.png": GREEN}, [(0, name, 1)], split="train")
    return root

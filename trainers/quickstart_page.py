"""The quickstart's result as one HTML file that needs nothing else: thumbnails are inside it, clips move."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from .quickstart_items import LANGUAGES, Entry
from .quickstart_search import Answer, Meter, Parameters


_TEMPLATE = Path(__file__).with_name("quickstart_page.html")
_FRAME_MILLISECONDS = 160
_WEBP_QUALITY = 88
TOP = 5
PLURALS = {"image": "pictures", "clip": "clips", "page": "headings", "text": "texts", "query": "queries"}
_SECTION_NOTES = {
    "text → image": "A name in some language finds a picture. The model never saw a picture by this artist.",
    "text → clip": "A name, or a name with a motion, finds a moving clip of eight frames.",
    "text → heading": (
        "A title finds the heading of a document, set in type: the model has to read. Its pictures are 64 pixels "
        "square, too few for the text of a whole page, so headings stand for pages here."
    ),
    "image → image": "A picture by one artist finds the same thing drawn by another.",
    "image + text → image": "A picture with a change in words finds the changed picture.",
    "image → text": "A picture finds its name, in any of the languages.",
    "text → text": "A Japanese name finds the English one.",
}


@dataclass(frozen=True)
class Measured:
    """
    One row of the measured table.

    Args:
        name (`str`):
            What was searched.
        queries (`int`):
            Number of queries.
        pool (`int`):
            Number of entries ranked.
        values (`dict[str, float]`):
            `R@1` and `R@10` in 0..1.
        chance (`dict[str, float]`):
            The same for a random order.
    """

    name: str
    queries: int
    pool: int
    values: dict[str, float]
    chance: dict[str, float]


@dataclass(frozen=True)
class Story:
    """
    Everything the page and the console tell.

    Args:
        model (`str`):
            Name of the model.
        answers (`list[Answer]`):
            The rankings, in the order they were asked.
        measured (`list[Measured]`):
            Results over all items.
        meter (`Meter`):
            Time and compute.
        parameters (`Parameters`):
            Sizes of the model.
        device (`str`):
            Where it ran, such as `"cpu, 2 threads"`.
        dimension (`int`):
            Numbers in a vector.
        seconds (`float`):
            Seconds for all of it, loading included.
        attribution (`str`):
            Credits of the gallery.
        versions (`dict[str, str]`):
            Versions of packages.
    """

    model: str
    answers: list[Answer]
    measured: list[Measured]
    meter: Meter
    parameters: Parameters
    device: str
    dimension: int
    seconds: float
    attribution: str
    versions: dict[str, str] = field(default_factory=dict)


def render_page(story: Story) -> str:
    """Returns the page as HTML text; everything that came from data is escaped."""
    fields = {
        "title": f"{story.model} quickstart",
        "introduction": _introduction(story),
        "tiles": "\n".join(_tile(*tile) for tile in tiles(story)),
        "measured_note": (
            "Not the examples below but every query of the kind. “Unseen” means that no picture of the thing, nor of "
            "its family, was in the training data. Ties count as wrong."
        ),
        "measured": "\n".join(_measured_row(row) for row in story.measured),
        "sections": "\n".join(_sections(story.answers)),
        "limits": html.escape(limits(story)),
        "compute": html.escape(compute_text(story)),
        "attribution": html.escape(story.attribution),
    }
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(fields)


def tiles(story: Story) -> list[tuple[str, str, str]]:
    """Returns title, value and small print of the figures at the top of the page."""
    meter, sizes = story.meter, story.parameters
    first = sum(answer.rank == 1 for answer in story.answers)
    top = sum(answer.rank <= TOP for answer in story.answers)
    rates = story.meter.rates
    total = sum(meter.items.values())
    shown = [
        ("questions below, right first", f"{first} of {len(story.answers)}", f"{top} have it in the top {TOP}"),
        ("embedded", f"{total:,} items", f"{story.dimension} numbers each, {story.seconds:.0f} s in all"),
    ]
    shown += [(f"{PLURALS[name]} a second", f"{rates[name]:,.0f}", story.device) for name in rates if name != "query"]
    shown.append(
        ("parameters", si(sizes.total), f"{si(sizes.decoder)} work on a token, {si(sizes.vision)} on a patch")
    )
    shown.append(("estimated compute", f"{si(sizes.flops(meter))}FLOP", f"{meter.tokens:,} tokens"))
    return shown


def limits(story: Story) -> str:
    """Returns what the reader should not conclude."""
    scope = (
        f"{story.model} is a small demonstration model: it knows drawn pictures of everyday things, short names in "
        "some languages and simple motions, and little else. "
        if story.model == "moemb-mini"
        else ""
    )
    return (
        f"{scope}The questions were fixed before their answers were seen; "
        "wrong answers are shown as they came. Only one picture counts as right, so a near twin counts as wrong. "
        "Measured results with baselines: moemb evaluate --config recipes/moemb-mini/evaluate.yaml."
    )


def compute_text(story: Story) -> str:
    """Returns time and compute in one sentence."""
    meter, sizes = story.meter, story.parameters
    rates = ", ".join(f"{rate:,.0f} {PLURALS[name]}/s" for name, rate in meter.rates.items())
    versions = ", ".join(f"{name} {version}" for name, version in story.versions.items())
    return (
        f"{meter.tokens:,} tokens and {meter.patches:,} image patches, about {si(sizes.flops(meter))}FLOP (two per "
        f"weight that works on a token or patch; attention scores left out). {rates} on {story.device}. Made "
        f"with {versions}."
    )


def si(value: float) -> str:
    """Returns a number with a unit prefix: 12300000 as `12.3 M`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _introduction(story: Story) -> str:
    kinds = ", ".join(f"{count:,} {PLURALS[name]}" for name, count in story.meter.items.items() if name != "query")
    return html.escape(
        f"{story.model} turned {kinds} into vectors of {story.dimension} numbers. Each question below is embedded by "
        "the same model; what lies nearest comes first, with its cosine similarity. The right answer has a "
        "green frame."
    )


def _tile(title: str, value: str, small: str) -> str:
    title, value, small = (html.escape(part) for part in (title, value, small))
    return f'<div class="tile"><dt>{title}</dt><dd>{value}<small>{small}</small></dd></div>'


def _measured_row(row: Measured) -> str:
    chance = f"{row.chance['R@1']:.1%} / {row.chance['R@10']:.1%}"
    cells = [f"{row.queries:,} × {row.pool:,}", f"{row.values['R@1']:.1%}", f"{row.values['R@10']:.1%}", chance]
    return f"<tr><td>{html.escape(row.name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _sections(answers: Sequence[Answer]) -> list[str]:
    parts = []
    for number, kind in enumerate(dict.fromkeys(answer.question.kind for answer in answers)):
        chosen = [answer for answer in answers if answer.question.kind == kind]
        right = sum(answer.rank == 1 for answer in chosen)
        note = f"{_SECTION_NOTES.get(kind, '')} Right first: {right} of {len(chosen)}."
        cards = "\n".join(_question_card(answer) for answer in chosen)
        parts.append(
            f'<section aria-labelledby="kind-{number}"><h2 id="kind-{number}">{html.escape(kind)}</h2>'
            f'<p class="soft">{html.escape(note)}</p>\n{cards}</section>'
        )
    return parts


def _question_card(answer: Answer) -> str:
    question = answer.question
    asked = []
    if "image" in question.item:
        asked.append(_plate(question.item, f"query picture: {question.label}"))
    if "text" in question.item:
        language = f' lang="{question.language}"' if question.language else ""
        asked.append(f"<q{language}>{html.escape(question.item['text'])}</q>")
    if question.language != "en" or "image" in question.item:
        asked.append(f'<span class="meaning">{html.escape(question.label)}</span>')
    tags = [LANGUAGES[question.language]] if question.language and "text" in question.item else []
    tags += ["unseen in training"] if question.unseen else []
    asked.append(f'<span class="tags">{"".join(f"<span class=tag>{html.escape(tag)}</span>" for tag in tags)}</span>')
    asked.append(_verdict(answer))
    found = any(answer.is_right(entry) for entry, _ in answer.top)
    # The right answer takes the last place when it is further down, so that every row has the same length.
    cards = [_result(answer, entry, score) for entry, score in (answer.top if found else answer.top[:-1])]
    if not found:
        cards.append(_result(answer, *answer.right, later=True))
    wide = " wide" if question.target in ("page", "text") else ""
    return (
        f'<article class="question"><div class="asked">{"".join(asked)}</div>'
        f'<ol class="results{wide}">{"".join(cards)}</ol></article>'
    )


def _verdict(answer: Answer) -> str:
    if answer.rank == 1:
        return f'<span class="verdict good">✓ right, first of {answer.pool:,}</span>'
    return f'<span class="verdict">right answer at {answer.rank:,} of {answer.pool:,}</span>'


def _result(answer: Answer, entry: Entry, score: float, later: bool = False) -> str:
    right = answer.is_right(entry)
    classes = "result" + (" right" if right else "") + (" later" if later else "")
    if entry.modality == "text":
        shown = f'<span class="words" lang="{entry.language}">{html.escape(entry.item["text"])}</span>'
        label = f"{LANGUAGES[entry.language]}: {entry.label}" if entry.language != "en" else "English"
    else:
        shown = _plate(entry.item, f"{entry.modality}: {entry.label}", strip=entry.modality == "page")
        label = "" if entry.modality == "page" else entry.label  # a heading says it itself
    mark = f'<span class="mark">{f"rank {answer.rank:,}" if later else "✓ right"}</span>' if right else ""
    width = max(0, min(100, round(score * 100)))
    return (
        f'<li class="{classes}">{shown}<span class="label">{html.escape(label)}</span>{mark}'
        f'<span class="score"><span class="track" aria-hidden="true"><span style="width:{width}%"></span></span>'
        f"{score:.2f}</span></li>"
    )


def _plate(item: Mapping[str, Any], description: str, strip: bool = False) -> str:
    alt = html.escape(description, quote=True)
    classes = "plate strip" if strip else "plate"
    if "video" in item:
        still, moving = data_uri([item["video"][0]]), data_uri(list(item["video"]))
        picture = (
            f'<picture style="display:contents"><source media="(prefers-reduced-motion: reduce)" srcset="{still}">'
            f'<img src="{moving}" alt="{alt}" loading="lazy"></picture>'
        )
    else:
        picture = f'<img src="{data_uri([item["image"]])}" alt="{alt}" loading="lazy">'
    return f'<span class="{classes}">{picture}</span>'


def data_uri(frames: Sequence[np.ndarray]) -> str:
    """
    A picture or a looping clip as a `data:` address.

    Args:
        frames (`Sequence[np.ndarray]`):
            One or more uint8 `[H, W, 3]`.

    Returns:
        `str`: `data:image/webp;base64,…`.
    """
    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    more: dict[str, Any] = {}
    if len(images) > 1:
        more = {"save_all": True, "append_images": images[1:], "duration": _FRAME_MILLISECONDS, "loop": 0}
    images[0].save(buffer, "WEBP", quality=_WEBP_QUALITY, **more)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")

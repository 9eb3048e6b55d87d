"""`moemb quickstart`: true search results from the shipped model in a minute, on the console and as one HTML page."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEMBError


HELP = "search pictures, clips, headings and names with the shipped moemb-mini and write a page of results"
DEFAULT_OUTPUT = Path("moemb-quickstart.html")
RESULTS = 6


class QuickstartError(MoEMBError, RuntimeError):
    """The quickstart cannot run. The message names what is missing and the command that makes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb quickstart`."""
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help="the page (default: %(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--print-model", action="store_true", help="print only the folder of the assembled moemb-mini")
    parser.add_argument("--model", default="moemb-mini", metavar="DIR_OR_ID", help="another MoEMB model repo")
    parser.add_argument("--gallery", type=Path, metavar="DIR", help="folder of the gallery (default: the shipped one)")
    parser.add_argument("--device", metavar="NAME", help="device (default: the best there is)")


def run(args: argparse.Namespace) -> int:
    """Runs `moemb quickstart`; returns the exit status."""
    if args.print_model:
        from .quickstart_model import mini_repository

        print(mini_repository())
        return 0
    started = time.perf_counter()
    from .corpus_gallery import load_gallery
    from .evaluation_report import prepare_output
    from .files import write_atomically
    from .quickstart_model import load_model
    from .quickstart_page import render_page

    prepare_output(args.output)
    gallery = load_gallery(args.gallery)
    _say("loading the model")
    model, source = load_model(args.model, args.device)
    name = Path(args.model).name
    if model[0].auto_model.config.model_type != "moemb":
        kind = model[0].auto_model.config.model_type
        raise QuickstartError(f"--model {args.model} is a '{kind}' model; the quickstart shows MoEMB models")
    _say(f"loaded SentenceTransformer({source!r}, trust_remote_code=True) in {time.perf_counter() - started:.1f} s")
    story = tell(model, name, gallery, started)
    print("\n".join(console_lines(story)))
    write_atomically(args.output, render_page(story))
    print(f"\nwrote {args.output} ({args.output.stat().st_size / 1e6:.1f} MB): open it in a browser")
    if args.open:
        import webbrowser

        webbrowser.open(args.output.resolve().as_uri())
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tell(model: Any, name: str, gallery: Any, started: float | None = None):
    """
    Embeds the gallery and asks the questions.

    Args:
        model (`SentenceTransformer`):
            The loaded model.
        name (`str`):
            Its name.
        gallery (`Gallery`):
            The shipped gallery.
        started (`float`, *optional*):
            When the command began, by `time.perf_counter`.

    Returns:
        `Story`: rankings, measurements, time and compute.
    """
    from .evaluation_report import package_versions
    from .quickstart_items import build_collection
    from .quickstart_page import Story
    from .quickstart_search import Index, Meter, count_parameters, counting, embed

    started = time.perf_counter() if started is None else started
    collection = build_collection(gallery)
    meter = Meter()
    network = model[0].auto_model
    vectors = np.zeros((len(collection.entries), 0), dtype=np.float32)
    with counting(network, meter):
        for modality in dict.fromkeys(entry.modality for entry in collection.entries):
            rows = [row for row, entry in enumerate(collection.entries) if entry.modality == modality]
            part = embed(model, [collection.entries[row].item for row in rows], modality, meter)
            if not vectors.shape[1]:
                vectors = np.zeros((len(collection.entries), part.shape[1]), dtype=np.float32)
            vectors[rows] = part
        asked = embed(model, [question.item for question in collection.questions], "query", meter, side="query")
    index = Index(collection.entries, vectors)
    answers = [
        index.search(question, vector, RESULTS) for question, vector in zip(collection.questions, asked, strict=True)
    ]
    return Story(
        model=name,
        answers=answers,
        measured=[measure(sweep, collection.entries, vectors) for sweep in collection.sweeps],
        meter=meter,
        parameters=count_parameters(network),
        device=_device_text(model),
        dimension=vectors.shape[1],
        seconds=time.perf_counter() - started,
        attribution=(gallery.folder / "ATTRIBUTION.md").read_text(encoding="utf-8"),
        versions=package_versions(),
    )


def _device_text(model: Any) -> str:
    import torch

    device = str(model.device)
    threads = torch.get_num_threads()
    return f"{device}, {threads} thread{'s' if threads != 1 else ''}" if device == "cpu" else device


def measure(sweep: Any, entries: Sequence[Any], vectors: np.ndarray) -> Any:
    """
    Measures a search over all its queries.

    Args:
        sweep (`Sweep`):
            The search.
        entries (`Sequence[Entry]`):
            The entries.
        vectors (`np.ndarray`):
            Float32 `[entries, dim]`, of unit length.

    Returns:
        `Measured`: recall and chance.
    """
    from .evaluation_metrics import chance_levels, query_values, rank_queries
    from .quickstart_page import Measured

    place = {entry.key: row for row, entry in enumerate(entries)}
    queries = vectors[[place[key] for key in sweep.queries]]
    documents = vectors[[place[key] for key in sweep.pool]]
    ranks = rank_queries(lambda start, stop: queries[start:stop] @ documents.T, sweep.relevant)
    values = {name: float(value.mean()) for name, value in query_values(ranks).items()}
    chance = chance_levels(ranks.pool, ranks.relevant)
    return Measured(sweep.title, len(sweep.queries), len(sweep.pool), values, chance)


def console_lines(story: Any) -> list[str]:
    """Returns what the command prints: the rankings, the measurements and the compute."""
    from .quickstart_page import TOP, compute_text, limits

    lines = []
    for number, answer in enumerate(story.answers, start=1):
        question = answer.question
        asked = [f"'{question.item['text']}'"] if "text" in question.item else []
        asked = (["a picture"] if "image" in question.item else []) + asked
        meaning = "" if question.language == "en" and "image" not in question.item else f" ({question.label})"
        unseen = ", unseen in training" if question.unseen else ""
        lines.append(f"\n{number:>2}. {question.kind}: {' + '.join(asked)}{meaning}{unseen}")
        for entry, score in answer.top:
            mark = "✓" if answer.is_right(entry) else " "
            shown = entry.item["text"] if entry.modality == "text" else entry.label
            lines.append(f"    {mark} {score:6.3f}  {shown}")
        if not any(answer.is_right(entry) for entry, _ in answer.top):
            lines.append(f"    ✗ the right answer is at {answer.rank:,} of {answer.pool:,} ({answer.right[1]:.3f})")
    first, top = (sum(answer.rank <= limit for answer in story.answers) for limit in (1, TOP))
    lines += ["", f"{len(story.answers)} questions: {first} right first, {top} right in the top {TOP}", ""]
    lines.append(f"{'measured over all items':<44}{'n x pool':>14}{'R@1':>8}{'R@10':>8}   chance R@1 / R@10")
    for row in story.measured:
        size = f"{row.queries} x {row.pool}"
        chance = f"{row.chance['R@1']:.1%} / {row.chance['R@10']:.1%}"
        lines.append(f"{row.name:<44}{size:>14}{row.values['R@1']:>8.1%}{row.values['R@10']:>8.1%}   {chance}")
    sizes = story.parameters
    lines += ["", compute_text(story)]
    lines.append(
        f"{sizes.total:,} parameters, of which {sizes.decoder:,} work on a token and {sizes.vision:,} on a patch; "
        f"{story.seconds:.0f} s in all."
    )
    return [*lines, "", limits(story)]

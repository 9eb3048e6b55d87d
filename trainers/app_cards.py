"""What the search page shows, as HTML; everything that came from files is escaped."""

import html
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from .quickstart_page import si
from .rag_index import Progress, Report
from .rag_readers import MODALITIES
from .rag_search import Answer
from .rag_store import Hit


NAMES = {"image": "picture", "page": "page", "text": "text", "clip": "clip"}
PLURALS = {"image": "Pictures", "page": "Pages", "text": "Texts", "clip": "Clips"}
_SNIPPET_CHARACTERS = 260
_SKIPPED_SHOWN = 200


def _escape(text: str) -> str:
    # Braces and dollars mean something to the page's own templates.
    return html.escape(text, quote=True).replace("{", "&#123;").replace("}", "&#125;").replace("$", "&#36;")


def results_html(hits: Sequence[Hit], heading: str, scored: bool = True) -> str:
    """
    The cards of some results.

    Args:
        hits (`Sequence[Hit]`): best first.
        heading (`str`): what they are, for people and screen readers.
        scored (`bool`, *optional*, defaults to `True`): whether they have a place and a score.

    Returns:
        `str`: HTML.
    """
    if not hits:
        return (
            '<div class="moemb-empty"><h2>Nothing to show</h2><p>Nothing in the index fits these filters. '
            "Allow more kinds, or wait until more is indexed.</p></div>"
        )
    cards = "\n".join(_card(hit, place if scored else 0) for place, hit in enumerate(hits, start=1))
    return f'<h2 class="moemb-heading">{_escape(heading)}</h2><ol class="moemb-results">{cards}</ol>'


def _card(hit: Hit, place: int) -> str:
    path = PurePosixPath(hit.path)
    folder = "" if str(path.parent) == "." else f"{path.parent}/"
    where = " · ".join(part for part in (folder, hit.place) if part)
    said = f"{place}. " if place else ""
    said += f"{path.name}, {NAMES[hit.modality]}{', ' + hit.place if hit.place else ''}"
    said += f", similarity {hit.score:.2f}" if place else ""
    text = hit.text if len(hit.text) <= _SNIPPET_CHARACTERS else hit.text[:_SNIPPET_CHARACTERS].rstrip() + " …"
    if hit.modality == "text":
        shown = f'<span class="words">{_escape(text)}</span>'
    else:
        picture = f'<img src="thumbnail/{hit.id}" alt="" loading="lazy" decoding="async">'
        if hit.modality == "clip":
            still = f'<source media="(prefers-reduced-motion: reduce)" srcset="thumbnail/{hit.id}?still=1">'
            picture = f"<picture>{still}{picture}</picture>"
        shown = f'<span class="plate">{picture}</span>'
    return (
        f'<li class="card {hit.modality}"><a href="{_address(hit)}" target="_blank" rel="noopener" '
        f'aria-label="{_escape(said)}; opens in a new tab">{shown}'
        f'<span class="kind">{NAMES[hit.modality]}</span></a>'
        f'<div class="about"><span class="name" title="{_escape(hit.path)}">{_escape(path.name)}</span>'
        f'<span class="where">{_escape(where)}</span>{_score(hit.score) if place else ""}'
        f'<button type="button" data-like="{hit.id}" aria-label="More like {_escape(path.name)}">More like this'
        "</button></div></li>"
    )


def _address(hit: Hit) -> str:
    if hit.page:
        return f"original/{hit.id}#page={hit.page}"
    return f"original/{hit.id}#t={hit.start:.1f}" if hit.start else f"original/{hit.id}"


def _score(score: float) -> str:
    width = round(100 * max(0.0, min(1.0, score)))
    return (
        f'<span class="score"><span class="track" aria-hidden="true"><span style="width:{width}%"></span></span>'
        f'<span title="cosine similarity">{score:.2f}</span></span>'
    )


def measured_html(answer: Answer) -> str:
    """Returns what a search took: the model at the chosen stop beside full compute, and the ranking."""
    ranking = f"{answer.pool:,} items ranked in {milliseconds(answer.searched)}"
    if not answer.spent:
        return f'<p class="moemb-measured">{ranking}; the query was not embedded again.</p>'
    chosen, full = answer.spent[0], next(one for one in answer.spent if not one.stop.budget)
    lead = f"<b>{milliseconds(chosen.seconds)}</b> to embed the query with {_escape(chosen.stop.name)}"
    parts = []
    if chosen is not full:
        parts.append(f"{milliseconds(full.seconds)} with full compute")
        parts.append(f"{1 - chosen.flops / full.flops:.0%} fewer FLOPs")
        if answer.agreement_of:
            parts.append(f"{answer.agreement[0]} of the best {answer.agreement_of} results are the same")
    else:
        parts.append(f"{si(full.flops)}FLOP")
    parts.append(f"{milliseconds(answer.prepared)} to prepare it")
    parts.append(ranking)
    return f'<p class="moemb-measured">{lead} <span>· {" · ".join(parts)}</span></p>'


def comparison_html(answer: Answer) -> str:
    """Returns a table of every stop of the dial, measured on the query of this answer."""
    if not answer.spent:
        return '<p class="moemb-measured">Search by words or by a file first: “more like this” embeds nothing.</p>'
    full = next(one for one in answer.spent if not one.stop.budget)
    order = sorted(range(len(answer.spent)), key=lambda row: -answer.spent[row].flops)
    slowest = max(one.seconds for one in answer.spent)
    rows = []
    for row in order:
        one = answer.spent[row]
        bar = round(100 * one.seconds / slowest)
        less = "" if one is full else f"{1 - one.flops / full.flops:.0%}"
        same = f"{answer.agreement[row]} of {answer.agreement_of}" if answer.agreement_of else ""
        mark = ' class="chosen"' if row == 0 else ""
        rows.append(
            f'<tr{mark}><th scope="row">{_escape(one.stop.name)}</th><td><span class="track" aria-hidden="true">'
            f'<span style="width:{bar}%"></span></span>{milliseconds(one.seconds)}</td>'
            f"<td>{less}</td><td>{same}</td></tr>"
        )
    note = (
        f"Forward pass of this one query, median of {full.runs} alternating runs. Small queries on small models gain "
        "little."
    )
    return (
        '<div class="moemb-table" tabindex="0"><table><thead><tr><th scope="col">compute</th><th scope="col">time</th>'
        '<th scope="col">FLOPs saved</th><th scope="col">same results</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='moemb-note'>{note}</p>"
    )


def status_html(counts: Mapping[str, int], progress: Progress, folder: str, error: str = "") -> str:
    """Returns the line under the title: what is in the index, and what is being done to it."""
    total = sum(counts.values())
    kinds = ", ".join(f"{counts[name]:,} {PLURALS[name].lower()}" for name in MODALITIES if counts[name])
    name = f'<b title="{_escape(folder)}">{_escape(PurePosixPath(folder).name or folder)}</b>'
    shown = f"{name}: {kinds}" if total else f"{name}: nothing indexed yet"
    if error:
        return f'<p class="moemb-status">{shown}</p><p class="moemb-alert" role="alert">{_escape(error)}</p>'
    if progress.state == "scanning":
        return f'<p class="moemb-status">{shown} · looking for changes</p>'
    if progress.state != "indexing" or not progress.total:
        return f'<p class="moemb-status">{shown}</p>'
    left = progress.seconds_left()
    wait = f", about {duration(left)} left" if left is not None else ""
    share = progress.done / progress.total
    values = f'aria-valuemin="0" aria-valuemax="{progress.total}" aria-valuenow="{progress.done}"'
    return (
        f'<p class="moemb-status">{shown} · indexing {progress.done:,} of {progress.total:,} files{wait}</p>'
        f'<div class="moemb-progress" role="progressbar" aria-label="indexing" {values}>'
        f'<span style="width:{share:.1%}"></span></div>'
    )


def report_html(report: Report | None) -> str:
    """Returns what the last update did, and every file that is not in the index with its reason."""
    if report is None:
        return '<p class="moemb-note">The first look at the folder is not over yet.</p>'
    counted = [
        (report.indexed, "embedded"),
        (report.renamed, "renamed"),
        (report.unchanged, "unchanged"),
        (report.removed, "gone"),
        (len(report.postponed), "changing, to be read next time"),
    ]
    done = ", ".join(f"{count:,} {what}" for count, what in counted if count) or "no files"
    end = "" if report.complete else " It was stopped; the next one goes on from there."
    lines = [f"<p>Last look at the folder: {done}, in {duration(report.seconds)}.{end}</p>"]
    if report.skipped:
        items = list(report.skipped.items())
        rows = "".join(
            f"<li><code>{_escape(path)}</code> {_escape(reason)}</li>" for path, reason in items[:_SKIPPED_SHOWN]
        )
        more = f"<li>and {len(items) - _SKIPPED_SHOWN:,} more</li>" if len(items) > _SKIPPED_SHOWN else ""
        lines.append(
            f'<details class="moemb-skipped"><summary>{len(items):,} file{"s" if len(items) != 1 else ""} not '
            f"indexed, or only in part</summary><ul>{rows}{more}</ul></details>"
        )
    return "".join(lines)


def alert_html(message: str) -> str:
    """Returns a message that a screen reader says at once."""
    return f'<p class="moemb-alert" role="alert">{_escape(message[:1].upper() + message[1:])}</p>'


def milliseconds(seconds: float) -> str:
    """Returns a time as `8.3 ms`, `120 ms` or `2.4 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def duration(seconds: float) -> str:
    """Returns a time as `3 s`, `4 min` or `1 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

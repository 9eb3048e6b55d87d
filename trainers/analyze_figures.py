"""The figures of `moemb analyze`, drawn from the rows that are written beside them."""

import math
from collections.abc import Sequence
from typing import Any

from .benchmark_report import figure


Row = dict[str, Any]
# Colours that readers with a colour-vision deficiency tell apart (Paul Tol's bright scheme).
COLOURS = {
    "text": "#4477AA",
    "image": "#EE6677",
    "video": "#228833",
    "emb": "#AA3377",
    "delimiter": "#999999",
    "tokens": "#BBBBBB",
    "beta": "#4477AA",
    "received": "#CCBB44",
    "emb row": "#AA3377",
    "reap": "#4477AA",
    "man": "#EE6677",
    "msan": "#228833",
    "frequency": "#CCBB44",
    "probability": "#66CCEE",
    "random": "#999999",
}
_LABELS = {"emb": "<emb>", "emb row": "<emb> row", "received": "attention received", "beta": "beta"}
_MARKERS = "osD^vP"


def draw_firing(rows: Sequence[Row], attention: Sequence[int]):
    """Firing rates: one panel for each budget and action that fired anywhere."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    panels = [
        (name, action)
        for name in budgets
        for action in ("dropped", "skipped")
        if any(row[action] > 0 for row in rows if row["budget"] == name)
    ] or [(name, "skipped") for name in budgets]
    drawing, axes = figure(len(panels), height=3.4)
    titles = {"dropped": "tokens dropped", "skipped": "experts skipped, of the tokens left"}
    for axis, (name, action) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if row["budget"] == name]
        _lines(axis, chosen, "block", action, "modality", attention)
        axis.set_title(f"{name}\n{titles[action]}", fontsize=9)
        axis.set_ylim(-0.04, 1.04)
        axis.set_ylabel("firing rate", fontsize=8)
    axes[0].legend(fontsize=7)
    return drawing


def draw_beta(rows: Sequence[Row], attention: Sequence[int]):
    """Beta by block: one panel for each kind of token, its median in 80 % of the tokens; and the means of all."""
    names = [name for name in dict.fromkeys(row["type"] for row in rows) if any(_tokens(rows, name))]
    drawing, axes = figure(len(names) + 1, width=4.4, height=3.2)
    _lines(axes[0], [row for row in rows if row["type"] in names], "block", "mean", "type", attention)
    axes[0].set_title("mean beta by kind of token", fontsize=9)
    axes[0].legend(fontsize=7)
    for axis, name in zip(axes[1:], names, strict=True):
        chosen = [row for row in rows if row["type"] == name]
        blocks = [row["block"] for row in chosen]
        colour = COLOURS[name]
        axis.fill_between(
            blocks, [row["p10"] for row in chosen], [row["p90"] for row in chosen], color=colour, alpha=0.25, lw=0
        )
        axis.plot(blocks, [row["p50"] for row in chosen], color=colour, marker="o", ms=4)
        axis.set_title(f"{_LABELS.get(name, name)}: median and 80 %, {_tokens(rows, name)[0]} tokens", fontsize=9)
        _blocks(axis, blocks, attention)
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(max(0, low), min(1, high))
    return drawing


def _tokens(rows: Sequence[Row], name: str) -> list[int]:
    return [row["tokens"] for row in rows if row["type"] == name and row["tokens"]]


def draw_agreement(rows: Sequence[Row]):
    """Left: correlations at each attention block. Middle: overlap of the better halves. Right: block by block."""
    joint = [row for row in rows if row["beta_block"] in ("", "all before")]
    single = [row for row in rows if row["beta_block"] not in ("", "all before")]
    drawing, axes = figure(3, width=4.6, height=3.6)
    pairs = list(dict.fromkeys((row["ranking"], row["with"]) for row in joint))
    for axis, value, low, high, chance in (
        (axes[0], "correlation", "low", "high", 0.0), (axes[1], "overlap", "overlap_low", "overlap_high", 0.5)
    ):  # fmt: skip
        for number, (one, other) in enumerate(pairs):
            chosen = [row for row in joint if (row["ranking"], row["with"]) == (one, other)]
            places = [row["attention_block"] + 0.12 * (number - 1) for row in chosen]
            label = f"{_LABELS[one]} and {_LABELS[other]}"
            colour = (COLOURS["emb row"], COLOURS["received"], COLOURS["tokens"])[number]
            _points(axis, places, chosen, value, low, high, label, colour, _MARKERS[number])
        axis.axhline(chance, color="#555555", lw=0.8, ls="--")
        blocks = sorted({row["attention_block"] for row in joint})
        axis.set_xticks(blocks)
        axis.set_xlim(blocks[0] - 0.8, blocks[-1] + 0.8)
        axis.set_xlabel("attention block", fontsize=8)
    items = max((row["items"] for row in rows), default=0)
    axes[0].set_title(f"rank correlation over an item's visual tokens\n({items} items, 95 % intervals)", fontsize=9)
    axes[1].set_title("overlap of the better halves\n(dashed: chance)", fontsize=9)
    for number, other in enumerate(("emb row", "received")):
        chosen = [row for row in single if row["with"] == other]
        places = [row["beta_block"] + 0.12 * (number - 0.5) for row in chosen]
        _points(
            axes[2], places, chosen, "correlation", "low", "high", _LABELS[other], COLOURS[other], _MARKERS[number]
        )
    axes[2].axhline(0, color="#555555", lw=0.8, ls="--")
    axes[2].set_title("one block's beta and the next attention block", fontsize=9)
    axes[2].set_xlabel("block of beta", fontsize=8)
    for axis in (axes[0], axes[2]):
        axis.set_ylim(-1.05, 1.05)
        axis.legend(fontsize=7, loc="best", framealpha=0.6)
    axes[1].set_ylim(0, 1.05)
    return drawing


def draw_focus(rows: Sequence[Row]):
    """Shares of tokens, beta and attention by kind of token: one panel for each attention block."""
    blocks = list(dict.fromkeys(row["attention_block"] for row in rows))
    drawing, axes = figure(len(blocks), width=4.8, height=3.4)
    for axis, block in zip(axes, blocks, strict=True):
        chosen = [row for row in rows if row["attention_block"] == block]
        sources = list(dict.fromkeys(row["source"] for row in chosen))
        names = [
            n for n in dict.fromkeys(r["type"] for r in chosen) if any(r["share"] for r in chosen if r["type"] == n)
        ]
        width = 0.8 / len(sources)
        for number, source in enumerate(sources):
            values = [next(r["share"] for r in chosen if (r["source"], r["type"]) == (source, n)) for n in names]
            places = [place + width * (number - (len(sources) - 1) / 2) for place in range(len(names))]
            axis.bar(places, values, width, color=COLOURS[source], label=_LABELS.get(source, source))
        axis.set_xticks(range(len(names)), [_LABELS.get(name, name) for name in names], fontsize=8)
        axis.set_title(f"attention block {block}: shares, mean over items", fontsize=9)
    axes[0].legend(fontsize=7)
    return drawing


def draw_load(rows: Sequence[Row]):
    """Share of each expert, as a multiple of an even share: one map for each modality, blocks downwards."""
    modalities = [
        n for n in dict.fromkeys(r["modality"] for r in rows) if any(r["pairs"] for r in rows if r["modality"] == n)
    ]
    experts = 1 + max(row["expert"] for row in rows)
    drawing, axes = figure(len(modalities), width=4.8, height=3.2)
    tables = {}
    for name in modalities:
        chosen = [row for row in rows if row["modality"] == name]
        blocks = 1 + max(row["block"] for row in chosen)
        table = [[math.nan] * experts for _ in range(blocks)]
        for row in chosen:
            table[row["block"]][row["expert"]] = row["share"] * experts
        tables[name] = table
    highest = max(value for table in tables.values() for line in table for value in line if value == value)
    for axis, (name, table) in zip(axes, tables.items(), strict=True):
        image = axis.imshow(table, cmap="viridis", vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
        axis.set_title(f"{name}: load of each expert, 1 = even", fontsize=9)
        axis.set_xlabel("expert", fontsize=8)
        axis.set_ylabel("block", fontsize=8)
    drawing.colorbar(image, ax=axes, shrink=0.9)
    return drawing


def draw_saliency(rows: Sequence[Row], metric: str = "R@10"):
    """Quality against the experts kept: the metric, and its change with intervals."""
    names = list(dict.fromkeys(row["saliency"] for row in rows))
    drawing, axes = figure(2, width=5.2, height=3.8)
    for number, name in enumerate(names):
        chosen = [row for row in rows if row["saliency"] == name]
        style = {"color": COLOURS.get(name, "#000000"), "marker": _MARKERS[number % len(_MARKERS)], "ms": 4}
        dashes = {"ls": "--"} if name == "random" else {}
        kept = [row["experts"] for row in chosen]
        axes[0].plot(kept, [row[metric] for row in chosen], label=name, **style, **dashes)
        shifted = [count + 0.12 * (number - (len(names) - 1) / 2) for count in kept]
        _points(axes[1], shifted, chosen, "change", "low", "high", name, style["color"], style["marker"], line=True)
    axes[0].set_title(f"{metric} (per cent, mean over tasks)", fontsize=9)
    axes[1].set_title("change from the whole model, points, 95 % intervals", fontsize=9)
    axes[1].axhline(0, color="#555555", lw=0.8, ls="--")
    for axis in axes:
        axis.set_xticks(sorted({row["experts"] for row in rows}))
        axis.set_xlabel("experts kept per block", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    return drawing


def _points(
    axis, places, rows, value: str, low: str, high: str, label: str, colour: str, marker: str, line: bool = False
) -> None:
    """Values with their intervals."""
    values = [row[value] for row in rows]
    below = [row[value] - row[low] for row in rows]
    above = [row[high] - row[value] for row in rows]
    style = {"color": colour, "marker": marker, "ms": 4, "capsize": 2, "elinewidth": 1, "lw": 1}
    axis.errorbar(places, values, [below, above], label=label, ls="-" if line else "none", **style)
    axis.tick_params(labelsize=7)


def _lines(axis, rows: Sequence[Row], across: str, value: str, by: str, attention: Sequence[int]) -> None:
    for number, name in enumerate(dict.fromkeys(row[by] for row in rows)):
        chosen = [row for row in rows if row[by] == name]
        if all(row[value] != row[value] for row in chosen):
            continue
        places, values = [row[across] for row in chosen], [row[value] for row in chosen]
        # the first lines are the widest: those of equal values show behind each other
        style = {"marker": _MARKERS[number % len(_MARKERS)], "ms": 7 - number, "lw": max(1.0, 4.0 - 1.2 * number)}
        axis.plot(places, values, label=_LABELS.get(name, name), color=COLOURS[name], **style)
    _blocks(axis, [row[across] for row in rows], attention)


def _blocks(axis, blocks: Sequence[int], attention: Sequence[int]) -> None:
    """The axis of blocks; those with full attention stand in grey."""
    last = max([*blocks, *attention])
    for block in attention:
        axis.axvspan(block - 0.4, block + 0.4, color="#eeeeee", zorder=0, lw=0)
    axis.set_xlim(-0.5, last + 0.5)
    step = max(1, (last + 1) // 12)
    axis.set_xticks(range(0, last + 1, step))
    axis.set_xlabel("block (grey: full attention)", fontsize=8)
    axis.tick_params(labelsize=7)


__all__ = ["draw_agreement", "draw_beta", "draw_firing", "draw_focus", "draw_load", "draw_saliency"]

"""The rows behind each figure of `moemb analyze`, as they are written to CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .analyze_measure import BETA_BINS, PAIRS, SOURCES, TYPES, Analysis, Firing, mean_and_interval
from .files import write_atomically


Row = dict[str, Any]
MODALITIES = ("text", "image", "video")
QUANTILES = (0.1, 0.5, 0.9)


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    """Writes rows of the same keys, by rename; numbers with six digits, NaN as nothing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["nothing"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    write_atomically(path, text.getvalue())
    return path


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return value


def firing_rows(fired: Mapping[str, Firing], slots: int, items: int) -> list[Row]:
    """
    How often each action fired.

    Args:
        fired (`Mapping[str, Firing]`): by name of the budget.
        slots (`int`): experts per token at full compute.
        items (`int`): items, hence pooled tokens, the only ones whose experts the last block runs.

    Returns:
        `list[dict]`: per budget, block and modality: `tokens` of the item before any was dropped, the part `dropped`
        before this block, and of the experts of the tokens left the part `skipped`; NaN where nothing could fire.
    """
    rows = []
    for name, firing in fired.items():
        last = len(firing.tokens) - 1
        for block, (alive, pairs) in enumerate(zip(firing.tokens.tolist(), firing.pairs.tolist(), strict=True)):
            for place, modality in enumerate(MODALITIES):
                before = int(firing.tokens[0, place])
                reaching = alive[place] if block < last else (items if modality == "text" else 0)
                rows.append(
                    {
                        "budget": name,
                        "block": block,
                        "modality": modality,
                        "tokens": before,
                        "dropped": 1 - alive[place] / before if before else float("nan"),
                        "skipped": 1 - pairs[place] / (slots * reaching) if reaching else float("nan"),
                    }
                )
    return rows


def beta_rows(found: Analysis, linear: Sequence[int]) -> list[Row]:
    """Beta by linear block and kind of token: number, mean and quantiles of the mean over heads."""
    centres = (torch.arange(BETA_BINS, dtype=torch.float64) + 0.5) / BETA_BINS
    rows = []
    for block, table in zip(linear, found.beta, strict=True):
        for name, counts in zip(TYPES, table, strict=True):
            tokens = int(counts.sum())
            mean = float((counts * centres).sum()) / tokens if tokens else float("nan")
            marks = {f"p{round(100 * q)}": _quantile(counts, q) for q in QUANTILES}
            rows.append({"block": block, "type": name, "tokens": tokens, "mean": mean, **marks})
    return rows


def _quantile(counts: Tensor, part: float) -> float:
    """A quantile of binned values in 0..1, linear inside a bin."""
    total = int(counts.sum())
    if not total:
        return float("nan")
    cumulative = counts.cumsum(0)
    place = int((cumulative < part * total).sum())
    before = int(cumulative[place] - counts[place])
    return (place + (part * total - before) / int(counts[place])) / len(counts)


def agreement_rows(found: Analysis, linear: Sequence[int], attention: Sequence[int], seed: int = 0) -> list[Row]:
    """
    Agreement of the rankings of an item's visual tokens, with 95 % bootstrap intervals over items.

    Returns:
        `list[dict]`: `beta` of the linear blocks before an attention block, or of one block alone (`beta_block`), with
        a column of that attention block: Spearman's `correlation`, and `overlap` of the better halves (chance 0.5).
    """
    rows = []
    for place, block in enumerate(attention):
        for number, (one, other) in enumerate(PAIRS):
            rho = mean_and_interval(found.correlation[:, place, number], seed=seed)
            half = mean_and_interval(found.overlap[:, place, number], seed=seed)
            blocks = "all before" if one == "beta" else ""
            rows.append(_agreement(block, one, blocks, other, rho, half))
    for place, block in enumerate(linear):
        following = next((number for number in attention if number > block), None)
        for number, other in enumerate(("emb row", "received")):
            if following is not None:
                rho = mean_and_interval(found.by_block[:, place, number], seed=seed)
                rows.append(_agreement(following, "beta", block, other, rho, (float("nan"),) * 3))
    return rows


def _agreement(attention: int, one: str, blocks: Any, other: str, rho: tuple, half: tuple) -> Row:
    names = ("correlation", "low", "high", "items")
    marks = dict(zip(("overlap", "overlap_low", "overlap_high"), half[:3], strict=True))
    return {"attention_block": attention, "ranking": one, "beta_block": blocks, "with": other} | dict(
        zip(names, rho, strict=True)
    ) | marks  # fmt: skip


def focus_rows(found: Analysis, attention: Sequence[int]) -> list[Row]:
    """What share of an item's tokens, beta and attention falls to each kind of token, mean over items."""
    return [
        {"attention_block": block, "source": source, "type": name, "share": float(share) / found.items}
        for block, table in zip(attention, found.focus, strict=True)
        for source, shares in zip(SOURCES, table, strict=True)
        for name, share in zip(TYPES, shares, strict=True)
        if float(shares.sum()) > 0
    ]


def load_rows(found: Analysis) -> list[Row]:
    """Pairs by block, modality and expert; `share` is of the modality's pairs in the block."""
    rows = []
    for block, table in enumerate(found.load):
        for modality, counts in zip(MODALITIES, table, strict=True):
            total = int(counts.sum())
            for expert, pairs in enumerate(counts.tolist()):
                share = pairs / total if total else float("nan")
                rows.append({"block": block, "modality": modality, "expert": expert, "pairs": pairs, "share": share})
    return rows


def saliency_rows(report: Mapping[str, Any], metric: str = "R@10") -> list[Row]:
    """
    Quality against the number of experts kept, from a report of `moemb prune-experts --sweep`.

    Returns:
        `list[dict]`: per saliency and number: mean of the metric over the tasks, and its change from the whole model
        with the paired 95 % interval, in points; the whole model is every saliency's first point.
    """
    whole = report["points"][0]
    names = list(dict.fromkeys(point["saliency"] for point in report["points"] if point["saliency"]))
    rows = []
    for name in names:
        points = [whole, *(point for point in report["points"] if point["saliency"] == name)]
        for point in sorted(points, key=lambda point: -point["experts"]):
            change = point["change"][metric]
            rows.append(
                {
                    "saliency": name,
                    "experts": point["experts"],
                    metric: 100 * point["mean"][metric],
                    "change": 100 * change["value"],
                    "low": 100 * change["interval"][0],
                    "high": 100 * change["interval"][1],
                }
            )
    return rows


__all__ = ["agreement_rows", "beta_rows", "firing_rows", "focus_rows", "load_rows", "saliency_rows", "write_csv"]

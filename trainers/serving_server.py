"""A running `vllm serve`, in vLLM's own environment and its own process group."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .serving import ServingError, serve_command


CACHE_GIB = 1  # of keys and values: enough for single prompts, small beside the weights
MAX_LENGTH = 2048
_LOG_LINES = 25


class Server:
    """
    Starts a server; `wait` until it answers, `close` it in the end.

    Args:
        python (`Path`): interpreter of vLLM's environment.
        folder (`Path`): the plain variant.
        dtype (`str`): of the arithmetic.
        log (`Path`): file for what it prints.
    """

    def __init__(self, python: Path, folder: Path, dtype: str, log: Path):
        self.name, self.port, self.log = str(folder), _free_port(), log
        words = serve_command(self.name, dtype, self.port).split()
        length = min(MAX_LENGTH, _longest(folder))
        command = [
            *program(python, words),
            "--max-model-len",
            str(length),
            "--host",
            "127.0.0.1",
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment |= {
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._output = log.open("w", encoding="utf-8")
        # a group of its own: the engine is a child of the server and must not outlive it
        self._process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def wait(self, timeout: float) -> None:
        """Returns when the server answers.

        Raises:
            ServingError: it ends or does not answer in time.
        """
        end = time.monotonic() + timeout
        with tqdm(desc="Starting vLLM", unit="s", delay=2, bar_format="{desc}: {elapsed}") as bar:
            while time.monotonic() < end:
                if self._process.poll() is not None:
                    raise ServingError(f"vLLM ended with status {self._process.returncode}:\n{self._tail()}")
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                        return
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
                    bar.update()
        raise ServingError(f"vLLM did not answer within {timeout:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        self._output.flush()
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])

    def embed(self, requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """
        Vectors of `POST /v1/embeddings`, one request an item: float32 `[requests, dim]`.

        Raises:
            ServingError: a request is refused.
        """
        rows = []
        for request in tqdm(requests, desc="Embedding with vLLM", unit="text", delay=2):
            body = json.dumps({"model": self.name, **request}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/v1/embeddings", data=body, headers={"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(asked, timeout=300) as answer:
                    rows.append(json.load(answer)["data"][0]["embedding"])
            except (OSError, ValueError, KeyError, IndexError) as error:
                said = error.read().decode(errors="replace")[:500] if hasattr(error, "read") else ""
                raise ServingError(f"vLLM refused {str(request)[:120]}: {error} {said}\n{self._tail()}") from error
        return np.asarray(rows, dtype=np.float32)

    def close(self) -> None:
        """Ends the server and its engine."""
        for sign, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, sign)
                try:
                    self._process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what the server left behind
        self._output.close()


def has_program(python: Path) -> bool:
    """Whether `vllm serve` starts: the program asks for the metadata of `vllm`, which the `vllm-cpu` package lacks."""
    return "vllm" in server_versions(python)


def program(python: Path, words: Sequence[str]) -> list[str]:
    """The words of `vllm serve NAME ...`, or of the module behind it where that program does not start."""
    if has_program(python):
        return [str(Path(python).parent / words[0]), *words[1:]]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", *words[2:]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _longest(folder: Path) -> int:
    """Positions that the model has."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(settings["text_config"].get("max_position_embeddings") or MAX_LENGTH)


def server_versions(python: Path) -> dict[str, str]:
    """Versions of vLLM and of what it stands on, in its environment."""
    code = (
        "import json; from importlib.metadata import version, PackageNotFoundError\n"
        "found = {}\n"
        "for name in ('vllm', 'vllm-cpu', 'torch', 'transformers'):\n"
        "    try:\n"
        "        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n"
        "        pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)

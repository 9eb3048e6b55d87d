"""vLLM's CPU build as a peer: a process of its own environment that embeds the same items with the same weights."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from .benchmark_models import EMB_ID, VOCABULARY, Item
from .benchmark_report import BenchmarkError


SCRIPT = Path(__file__).with_name("benchmark_vllm.py")
DEFAULT_PYTHON = Path(os.environ.get("MOEMB_CACHE", "~/.cache/moemb")).expanduser() / "vllm-venv" / "bin" / "python"
CACHE_GIB = 2  # its key-value cache: enough for the longest items of the suite, small beside the weights


class VllmPeer:
    """
    A running vLLM engine.

    Args:
        python (`Path`): the interpreter of the environment that holds vLLM.
        stock (`Qwen3_5MoeModel`): the model to serve; its weights are written to a temporary folder.
        threads (`int`): threads that it may use.

    Raises:
        BenchmarkError: vLLM does not start; the message is its own.
    """

    def __init__(self, python: Path, stock, threads: int):
        self.folder = tempfile.TemporaryDirectory(prefix="moemb-vllm-")
        try:
            export_stock(stock, Path(self.folder.name))
            environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
            environment |= {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" takes all cores whatever the number of threads
                # in its own process the engine would survive us when we are killed
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            self.process = subprocess.Popen(
                [str(python), str(SCRIPT), self.folder.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            self.version = self._answer()["ready"]
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"vLLM ended with status {self.process.wait()}; its log is above")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"vLLM: {answer['error']}; pass --vllm none to go without it")
        return answer

    def _ask(self, items: list[Item], vectors: bool) -> dict:
        request = {"items": [item.ids for item in items], "vectors": vectors}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def encode(self, items: list[Item]) -> Tensor:
        """Unit vectors of text items, `torch.FloatTensor` of shape `(items, hidden)`."""
        return torch.tensor(self._ask(items, True)["vectors"])

    def run(self, items: list[Item]) -> float:
        """Embeds items and keeps nothing but the seconds that vLLM itself counted."""
        return self._ask(items, False)["seconds"]

    def close(self) -> None:
        """Ends the process and removes the weights."""
        process = getattr(self, "process", None)
        if process is not None:
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.folder.cleanup()


def export_stock(stock, folder: Path) -> None:
    """
    Writes transformers' model as the causal language model that vLLM takes for an embedder.

    Args:
        stock (`Qwen3_5MoeModel`): the model; its text decoder is written, with its embedding as output layer, and
            a tokenizer of made-up words.
        folder (`Path`): an empty folder.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM

    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(stock.config.text_config)
    model.model = stock.language_model
    model.lm_head.weight = stock.get_input_embeddings().weight
    model.save_pretrained(folder, max_shard_size="50GB")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= {"architectures": ["Qwen3_5MoeForCausalLM"], "eos_token_id": EMB_ID}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    # it is given ids, and yet does not embed without a tokenizer
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{EMB_ID}").save_pretrained(folder)

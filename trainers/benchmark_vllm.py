"""Embeds with vLLM on request: the other side of `benchmark_vllm_peer`, run by the Python of vLLM's own environment.

It imports nothing of MoEMB. Usage: `python benchmark_vllm.py MODEL_FOLDER`; then one JSON request per line on stdin
(`{"items": [[token ids], ...], "vectors": true}`) gives one JSON reply per line on stdout
(`{"seconds": 1.2, "vectors": [[...], ...]}`). The first line it writes is `{"ready": VERSION}`.
"""

import json
import os
import sys
import time


def reply_stream():
    """The real stdout, for replies alone: whatever vLLM prints goes to stderr."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def load(folder: str):
    """vLLM's engine as an embedder: last-token pooling, unit vectors."""
    from vllm import LLM
    from vllm.config import PoolerConfig

    return LLM(
        model=folder,
        runner="pooling",
        convert="embed",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        pooler_config=PoolerConfig(pooling_type="LAST"),
    )


def main(folder: str) -> int:
    """Serves requests until stdin ends."""
    stream = reply_stream()

    def say(message: dict) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        import vllm

        model = load(folder)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    say({"ready": vllm.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["items"]]
        start = time.perf_counter()
        try:
            outputs = model.embed(prompts, use_tqdm=False)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            continue
        message = {"seconds": time.perf_counter() - start}
        if request.get("vectors"):
            message["vectors"] = [output.outputs.embedding for output in outputs]
        say(message)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

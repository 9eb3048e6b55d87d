"""A stand-in of `vllm serve`: the same address, answered by Sentence Transformers on the plain variant.

`environment(folder)` makes what looks like the environment of a vLLM installation, with `bin/python` and `bin/vllm`.
FAKE_VLLM=refuse-fp32 ends at once in float32, =wrong answers with other vectors, =stuck never listens.
"""

import itertools
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def environment(folder: Path) -> Path:
    """Writes the two programs; returns the Python."""
    folder.mkdir(parents=True)
    for name, target in (("python", ""), ("vllm", f" {Path(__file__).resolve()}")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable}{target} "$@"\n')
        program.chmod(0o755)
    about = folder / "site" / "vllm-0.0.0.dist-info" / "METADATA"  # found by way of PYTHONPATH
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0\n")
    return folder / "python"


def main() -> None:
    words = sys.argv[1:]
    assert words[0] == "serve" and words[2:6] == ["--runner", "pooling", "--convert", "embed"], words
    flags = dict(itertools.pairwise(words))
    folder, port, mode = words[1], int(flags["--port"]), os.environ.get("FAKE_VLLM", "")
    if mode == "refuse-fp32" and flags["--dtype"] == "float32":
        sys.exit("float32 is not supported here")
    if mode == "stuck":
        sys.stdin.read()
        import time

        time.sleep(600)
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, flags["--dtype"])})

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply({})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/embeddings" and asked["model"] == folder
            ids = asked.get("input")
            if ids is None:
                text = model[0].processor.apply_chat_template(asked["messages"], tokenize=False)
                ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                state = model[0].model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].float()
            vector = torch.nn.functional.normalize(state, dim=0)
            if mode == "wrong":
                vector = vector.flip(0)
            data = {"object": "embedding", "index": 0, "embedding": vector.tolist()}
            usage = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
            self.reply({"object": "list", "model": folder, "data": [data], "usage": usage})

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()

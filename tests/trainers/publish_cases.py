"""Small models to publish, Hub caches made by hand, and a stand-in of the Hub's HTTP API."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers.model_card import count_parameters

from ..processors import lean_processor


CARD = """\
license: apache-2.0
description: A model of {publication.json#/parameters/total|count} parameters for tests.
limits:
  - It has learned nothing.
language: [en]
"""
RECIPE = "method: mini-contrastive\nlearning_rate: 0.001\n"


def entry(value: float) -> dict:
    return {"value": value, "interval": [value - 0.05, value + 0.05]}


def evaluation(parameters: int) -> dict:
    """A report as `moemb evaluate` writes it, with one task."""
    system = {name: entry(value) for name, value in (("R@1", 0.25), ("R@10", 0.5), ("MRR", 0.375))}
    line = {
        "line": "all", "queries": 165, "pool": [1914, 1914], "chance": {"R@1": 0.0005, "R@10": 0.005, "MRR": 0.004},
        "systems": [{"name": "tiny", "ablation": False, "note": "", **system}],
        "verdict": {"above_chance": True, "above_baselines": None, "not_above": []},
    }  # fmt: skip
    task = {"number": "2", "name": "emoji-concept", "kind": "text->image", "lines": [line]}
    return {"model": {"name": "tiny", "parameters": parameters}, "tasks": [task]}


def dial() -> dict:
    """A report as `moemb bench --config` writes it, with two policies at one size."""
    names = {"full compute": {}, "top-1": {"top_k": 1}}
    removed = {"total": 0.125, "decoder": 0.25, "moe": 0.5}
    none = dict.fromkeys(removed, 0.0)
    timed = {
        "full compute": {"qps": 400.0, "flops_removed": none, "time_removed": none},
        "top-1": {"qps": 512.0, "flops_removed": removed, "time_removed": removed},
    }
    size = {"size": 64, "items": 64, "tokens": 999, "policies": timed, "timing": None}
    quality = {
        name: {"mean": {"R@10": entry(0.5 - step)}, "change": {"R@10": entry(-step)}}
        for name, step in (("full compute", 0.0), ("top-1", 0.0625))
    }
    return {
        "config": {"metric": "R@10"}, "machine": {"processor": "a CPU", "threads": 1}, "sizes": [size],
        "policies": [{"name": name, "adaptive_compute": budget} for name, budget in names.items()],
        "quality": {"tasks": [{"name": "emoji-concept"}], "policies": quality},
        "work": {"top-1": {"flops_removed": removed}},
    }  # fmt: skip


def make_checkpoint(folder: Path, tiny_settings: dict) -> Path:
    """A training checkpoint with its record, card, recipe and results beside it: `folder/checkpoint`."""
    processor = lean_processor()
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    settings = tiny_settings | {name: getattr(processor, name) for name in names}
    config = MoEMBConfig(**settings, emb_token_id=processor.tokenizer.convert_tokens_to_ids("<emb>"))
    checkpoint = folder / "checkpoint"
    MoEMBModel(config).eval().save_pretrained(checkpoint)
    processor.save_pretrained(checkpoint)
    path = checkpoint / "tokenizer.json"  # normalised as Qwen3.5's, so that stock stacks read texts alike
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    command = {"command": "moemb train --config recipes/tiny/train.yaml --max_steps 3", "versions": {"torch": "2"}}
    (checkpoint / "training.json").write_text(json.dumps({"step": 3, "commands": [command]}))
    (folder / "card.yaml").write_text(CARD)
    (folder / "train.yaml").write_text(RECIPE)
    (folder / "results").mkdir()
    report = evaluation(count_parameters(config)["total"])
    (folder / "results" / "evaluation.json").write_text(json.dumps(report))
    (folder / "results" / "dial.json").write_text(json.dumps(dial()))
    return checkpoint


def to_hub_cache(tree: Path, repository: str, cache: Path, repo_type: str = "model") -> None:
    """Lays a tree out as the Hub client does after a download."""
    commit = hashlib.sha1(repository.encode()).hexdigest()
    folder = cache / f"{repo_type}s--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(tree, folder / "snapshots" / commit)


def new_repository(private: bool = False, **files: bytes) -> dict:
    """A repository of the stand-in."""
    return {"private": private, "files": {".gitattributes": b""} | files, "commits": [], "branches": {}}


class StandIn:
    """
    The parts of the Hub's API that an upload uses, in memory, behind a local port.

    `repos[kind, id]` is a [`new_repository`]; `storage` holds what was sent before a commit;
    `fail_at(method and part of path, times)` breaks the connection there.
    """

    def __init__(self):
        self.repos, self.storage, self.requests, self.failures = {}, {}, [], {}
        self.orgs = ["moemb-test"]
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                path = unquote(urlparse(self.path).path)
                stand_in.requests.append((self.command, path))
                for place in list(stand_in.failures):
                    method, part = place
                    if method == self.command and part in path and stand_in.failures[place] > 0:
                        stand_in.failures[place] -= 1
                        self.close_connection = True
                        self.connection.close()
                        return
                status, content, headers = stand_in.answer(self.command, path, body)
                data = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail_at(self, method: str, part: str, times: int = 1000) -> None:
        self.failures[method, part] = times

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object, dict]:
        words = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user", "orgs": [{"name": name} for name in self.orgs]}, {}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if words[0] == "lfs":
            self.storage[words[1]] = body
            return 200, {}, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if words[0] == "api" and words[1] in ("models", "kernels"):
            return self._repository(method, (words[1][:-1], "/".join(words[2:4])), words[4:], body)
        return 404, {"error": f"no such address: {method} {path}"}, {}

    def _create(self, asked: dict) -> tuple[int, object, dict]:
        key = (asked.get("type", "model"), f"{asked['organization']}/{asked['name']}")
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.repos[key] = new_repository(private)
        return 200, {"url": f"{self.endpoint}/{key[1]}", "name": key[1]}, {}

    def _batch(self, asked: dict) -> tuple[int, object, dict]:
        objects = []
        for wanted in asked["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.storage:
                answer["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}
            objects.append(answer)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _repository(self, method: str, key: tuple, rest: list[str], body: bytes) -> tuple[int, object, dict]:
        if key not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        repo = self.repos[key]
        if not rest or rest[0] == "revision":
            sha = hashlib.sha1(repr(repo["commits"]).encode()).hexdigest()
            files = [{"rfilename": name} for name in repo["files"]]
            return 200, {"id": key[1], "sha": sha, "private": repo["private"], "siblings": files, "tags": []}, {}
        if rest[0] == "tree":
            repo = repo["branches"].get(rest[1], repo)
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repo["files"].items()
            ]
            return 200, listed, {}
        if rest[0] == "refs":
            names = ["main", *repo["branches"]]
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0" * 40} for name in names]
            return 200, {"branches": branches, "tags": [], "converts": []}, {}
        if rest[0] == "branch":
            repo["branches"][rest[1]] = {"files": dict(repo["files"]), "commits": []}
            return 200, {}, {}
        if rest[0] == "settings":
            asked = json.loads(body)
            repo["private"] = asked.get("private", asked.get("visibility") == "private")
            return 200, {}, {}
        if rest[-1] in repo["branches"]:
            repo = repo["branches"][rest[-1]]
        if rest[0] == "preupload":
            return 200, {"files": [self._mode(repo, file) for file in json.loads(body)["files"]]}, {}
        if rest[0] == "commit":
            return self._commit(key, repo, body)
        return 404, {"error": f"no such address: {method} {rest}"}, {}

    def _mode(self, repo: dict, file: dict) -> dict:
        large = file["path"].endswith((".safetensors", ".png", ".so"))
        answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        if file["path"] in repo["files"]:
            data = repo["files"][file["path"]]
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            answer["oid"] = hashlib.sha256(data).hexdigest() if large else blob
        return answer

    def _commit(self, key: tuple, repo: dict, body: bytes) -> tuple[int, object, dict]:
        files, summary = dict(repo["files"]), ""
        for line in body.decode().splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "header":
                summary = value["summary"]
            elif part["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                files[value["path"]] = self.storage[value["oid"]]
            elif part["key"] == "deletedFile":
                del files[value["path"]]
        repo["files"] = files
        repo["commits"].append(summary)
        oid = hashlib.sha1(repr((key, repo["commits"])).encode()).hexdigest()
        return 200, {"commitUrl": f"{self.endpoint}/{key[1]}/commit/{oid}", "commitOid": oid}, {}

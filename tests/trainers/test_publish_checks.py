"""The rules of a tree, each broken once."""

import json
import re
import shutil
import struct

import pytest

from moemb.trainers.publish_assemble import Tree, write_record
from moemb.trainers.publish_checks import check_tree
from moemb.trainers.publish_manifest import manifest_findings, write_manifest
from moemb.trainers.publish_sources import CardSettings, Sources, SourceState, record_of
from moemb.trainers.repository import assemble_checkpoint

from .publish_cases import make_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_settings):
    """A tree that keeps every rule."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("source"), tiny_settings)
    folder = assemble_checkpoint(checkpoint, tmp_path_factory.mktemp("tree") / "tiny")
    state = SourceState(folder, "0" * 40, "2030-01-01T00:00:00+00:00")
    sources = Sources(checkpoint, state, CardSettings(license="mit"), [], {}, True)
    write_record(folder, record_of(sources, "moemb-test/tiny", "model", []))
    assert check_tree(Tree("moemb-test/tiny", "model", "model", folder)) == []
    return folder


@pytest.fixture
def tree(whole, tmp_path) -> Tree:
    shutil.copytree(whole, tmp_path / "tiny")
    return Tree("moemb-test/tiny", "model", "model", tmp_path / "tiny")


def edit_json(path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def write(name: str, content: str | bytes):
    def change(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def append(name: str, text: str):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def replace(name: str, old: str, new: str):
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


CASES = {
    "a pickle by its name": (write("optimizer.pt", b"x"), r"optimizer.pt: is a .pt file"),
    "a pickle by its content": (write("state.json", b"\x80\x04\x95"), "state.json: holds a pickle"),
    "a zip by its content": (write("state.txt", b"PK\x03\x04..."), "state.txt: holds a pickle or an archive"),
    "a hidden file": (write(".env", "A=1"), ".env: is hidden"),
    "a cache": (write("__pycache__/a.txt", "x"), "__pycache__/a.txt: is hidden or a cache"),
    "a link": (lambda folder: (folder / "a.txt").symlink_to("/etc/hostname"), "a.txt: is a link"),
    "a library": (write("fast.so", b"\x7fELF"), "fast.so: is a .so file"),
    "a path of a home": (
        write("log.jsonl", '{"a": 1}\n{"dir": "/home/me/runs"}\n'),
        "log.jsonl line 2: names the folder '/home/me'",
    ),
    "a path of a temporary folder": (write("notes.md", "see /tmp/x1/out"), "names the folder '/tmp/x1'"),
    "a path of Windows": (write("notes.json", '{"d": "C:\\\\Users\\\\me"}'), "notes.json line 1: names the folder"),
    "a token": (write("notes.md", "hf_" + "a" * 34), "notes.md: holds an access token"),
    "no UTF-8": (write("notes.md", b"\xff\xfe\xff"), "notes.md: is not UTF-8"),
    "code that is missing": (
        lambda folder: (folder / "packing_moemb.py").unlink(),
        "imports .packing_moemb, which is not in",
    ),
    "another package of ours": (append("modeling_moemb.py", "\nimport moemb.trainers\n"), "imports moemb.trainers"),
    "a demand on users": (append("modeling_moemb.py", "\nimport requests\n"), "imports requests; guard it"),
    "broken code": (append("items_moemb.py", "\ndef (\n"), "items_moemb.py: is no Python"),
    "no auto_map": (
        lambda f: edit_json(f / "config.json", lambda d: d.pop("auto_map")),
        "has no AutoModel in its auto_map",
    ),
    "code of another repository": (
        lambda f: edit_json(f / "config.json", lambda d: d["auto_map"].update(AutoModel="a/b--modeling_moemb.X")),
        "takes its code from another repository",
    ),
    "a class that is not there": (
        lambda f: edit_json(f / "config.json", lambda d: d["auto_map"].update(AutoModel="modeling_moemb.Nothing")),
        "modeling_moemb.py: has no class Nothing",
    ),
    "no modules.json": (lambda folder: (folder / "modules.json").unlink(), "modules.json: is missing"),
    "another pooling": (
        lambda f: edit_json(f / "1_Pooling" / "config.json", lambda d: d.update(pooling_mode="mean")),
        "pools 'mean' over 64 dimensions",
    ),
    "a weight file that no index names": (
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "extra.safetensors"),
        "extra.safetensors: holds .* tensors that the index does not name",
    ),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "weights: .*is cut short",
    ),
    "weights of another size": (
        lambda f: edit_json(f / "publication.json", lambda d: d.update(parameters={"total": 7, "active": 7})),
        "hold .* total parameters, the card says 7",
    ),
    "no licence on the card": (
        replace("README.md", "license: mit\n", ""),
        "README.md: has no license in its metadata",
    ),
    "an unknown licence": (
        replace("README.md", "license: mit", "license: MIT"),
        "README.md: has the licence 'MIT'",
    ),
    "no metadata": (write("README.md", "# tiny\n"), "README.md: has no metadata"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_named(tree, name):
    change, said = CASES[name]
    change(tree.folder)
    write_manifest(tree.folder)  # so that the manifest is not what is found
    findings = [str(finding) for finding in check_tree(tree)]
    assert any(re.search(said, finding) for finding in findings), findings
    assert all(finding.startswith("moemb-test/tiny/") and "; " in finding for finding in findings)


def test_a_plain_variant_has_no_code(tree):
    plain = Tree("moemb-test/tiny", "model", "plain", tree.folder)
    findings = [str(finding) for finding in check_tree(plain)]
    assert any("modeling_moemb.py: is code" in finding for finding in findings)
    assert any("config.json: has an auto_map" in finding for finding in findings)


def test_a_manifest_knows_every_file(tree):
    assert list(manifest_findings(tree.folder)) == []
    (tree.folder / "new.txt").write_text("x")
    (tree.folder / "chat_template.jinja").unlink()
    weights = tree.folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (tree.folder / "config.json").write_text("{}")
    assert sorted(name for name, _ in manifest_findings(tree.folder)) == [
        "chat_template.jinja", "config.json", "model.safetensors", "new.txt",
    ]  # fmt: skip
    (tree.folder / "manifest.json").write_text("[")
    assert [name for name, _ in manifest_findings(tree.folder)] == ["manifest.json"]


def test_a_header_that_promises_more_than_there_is(tree):
    (tree.folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**6) + b"{}")
    assert any("is not a safetensors file" in str(finding) for finding in check_tree(tree))

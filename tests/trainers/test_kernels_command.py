"""`moemb kernels`: what runs, where it comes from, and why the rest does not."""

import json
from pathlib import Path

import pytest

from modeling_moemb import kernels_moemb
from moemb.trainers import cli


INIT = """
from . import nothing_else


def isa():
    return "avx512"


def linear(input, weight, bias):
    return input @ weight.T


CONTRACT = 1


def supports(op, *tensors):
    return op == "linear" and tensors[0].element_size() == 2
"""


pytestmark = pytest.mark.usefixtures("no_kernels_chosen")


@pytest.fixture
def staged(tmp_path) -> Path:
    """A stand-in for moemb-cpu with one operation, staged in this environment."""
    from kernels._rust import Digest, DigestAlgorithm

    folder = tmp_path / "staged" / "moemb-cpu"
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(INIT)
    (variant / "nothing_else.py").write_text("")
    metadata = {"name": "moemb-cpu", "id": "_command", "version": 1, "license": "Apache-2.0", "python-depends": []}
    metadata["backend"] = {"type": "cpu"}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": digest.files}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (folder / "status.json").write_text('{"state": "ok", "message": ""}')
    return variant


def report(capsys) -> dict:
    assert cli.main(["kernels", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text(capsys) -> str:
    assert cli.main(["kernels"]) == 0
    return capsys.readouterr().out


def row(lines: str, op: str) -> list[str]:
    (line,) = [line for line in lines.splitlines() if line.split()[:2] == [op, "cpu"]]
    return line.split()


def test_with_a_kernel(staged, capsys):
    found = report(capsys)
    (loaded,) = [entry for entry in found["loaded"] if entry["device"] == "cpu"]
    assert loaded["repository"] == "moemb-cpu" and not loaded["broken"]
    assert (loaded["version"], loaded["id"], loaded["isa"], loaded["digest"]) == (1, "_command", "avx512", "valid")
    assert loaded["folder"] == str(staged)
    rows = {entry["op"]: entry for entry in found["operations"] if entry["device"] == "cpu"}
    assert list(rows) == list(kernels_moemb.OPERATIONS)
    assert rows["linear"]["dtypes"] == ["bfloat16", "float16"] and rows["linear"]["source"] == "moemb-cpu"
    assert rows["experts"]["source"] == "torch"
    assert found["staged"][0]["variants"][0]["digest"] == "valid"
    assert {"torch", "transformers", "kernels"} <= set(found["versions"])

    shown = text(capsys)
    assert row(shown, "linear") == ["linear", "cpu", "moemb-cpu", "bfloat16,", "float16"]
    assert row(shown, "experts")[2:] == ["torch", "moemb-cpu", "does", "not", "offer", "it"]
    assert "instructions avx512, digest valid" in shown and "1 of 10 operations" in shown
    assert max(map(len, shown.splitlines())) < 200


def test_a_changed_file_is_named(staged, capsys):
    (staged / "nothing_else.py").write_text("x = 1")
    shown = text(capsys)
    assert "wrong digest" in shown and "nothing_else.py" in shown and "0 of 10 operations" in shown
    assert "nothing_else.py" in report(capsys)["staged"][0]["variants"][0]["digest"]


def test_without_kernels(capsys):
    shown = text(capsys)
    assert "moemb-cpu for cpu: not staged in this environment: 'make install'" in shown
    assert row(shown, "experts") == ["experts", "cpu", "torch", "see", "above"]
    assert report(capsys)["staged"] == []


@pytest.mark.parametrize("state", ["failed", "no-compiler"])
def test_why_staging_failed_is_shown_whole(tmp_path, capsys, state):
    folder = tmp_path / "staged" / "moemb-cpu"
    folder.mkdir(parents=True)
    message = "csrc/experts.cpp does not compile:\nline 3: error"
    (folder / "status.json").write_text(json.dumps({"state": state, "message": message}))
    shown = text(capsys)
    assert f"moemb-cpu could not be staged ({state}):" in shown and "  line 3: error" in shown


def test_the_environment_is_shown(staged, monkeypatch, capsys):
    monkeypatch.setenv("MOEMB_KERNELS", "off")
    monkeypatch.setenv("MOEMB_CPU_ISA", "avx512")
    shown = text(capsys)
    assert "kernels: MOEMB_KERNELS=off, MOEMB_CPU_ISA=avx512" in shown and "0 of 10 operations" in shown
    assert "switched off by use_kernels or MOEMB_KERNELS" in shown

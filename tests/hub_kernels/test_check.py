"""The checker: clean repositories pass, and each broken rule is named with its file and a remedy."""

import shutil
from pathlib import Path

import pytest

from .toy_kernels import make_compiled, make_noarch


@pytest.fixture(scope="module")
def checker():
    import check

    return check


@pytest.fixture
def compiled(tmp_path) -> Path:
    return make_compiled(tmp_path / "moemb-toy")


@pytest.fixture
def noarch(tmp_path) -> Path:
    return make_noarch(tmp_path / "moemb-plain")


def test_clean_sources_pass(checker, compiled, noarch):
    assert list(checker.check_sources(compiled)) == []
    assert list(checker.check_sources(noarch)) == []


@pytest.mark.parametrize("name", sorted(path.parent.name for path in Path("hub_kernels").glob("*/build.toml")))
def test_our_sources_pass(checker, name):
    assert [str(finding) for finding in checker.check_sources(checker.repositories([name])[0])] == []


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


LAYER = "    def forward(self, x):\n        return x * 2\n"


@pytest.mark.parametrize(
    ("added", "rule", "remedy"),
    [
        ("import numpy", "imports 'numpy'", "python-depends"),
        ("def f():\n    from transformers import AutoModel", "imports 'transformers'", "try"),
        ("try:\n    import fla\nexcept ValueError:\n    pass", "imports 'fla'", "ImportError"),
        ("try:\n    pass\nexcept ImportError:\n    import fla", "imports 'fla'", "ImportError"),
        ("import moemb_plain.layers", "imports 'moemb_plain.layers' absolutely", "relative"),
        ("from ..other import x", "imports from outside the repository", "whole"),
        ("torch.library.define('moemb::x', '() -> ()')", "fixed name 'moemb::x'", "add_op_namespace_prefix"),
        ("n = 1\ntorch.library.custom_op(f'moemb::x{n}')", "is given the fixed name", "add_op_namespace_prefix"),
        ("torch.library.Library('moemb', 'DEF')", "fixed name 'moemb'", "add_op_namespace_prefix"),
        ("torch.ops.moemb.x()", "uses torch.ops.moemb", "add_op_namespace_prefix"),
    ],
)
def test_rules_of_python_sources(checker, noarch, added, rule, remedy):
    path = noarch / "torch-ext" / "moemb_plain" / "__init__.py"
    path.write_text(f"{path.read_text()}\n{added}\n")
    (finding,) = checker.check_sources(noarch)
    assert rule in finding.rule and remedy in finding.remedy and finding.where.startswith(f"{path}:")


def test_what_python_sources_may_do(checker, noarch):
    path = noarch / "torch-ext" / "moemb_plain" / "more.py"
    path.write_text(
        "import os, torch, triton\nfrom torch import nn\nfrom .layers import Scale\ntry:\n    import fla\n"
        "except ImportError:\n    fla = None\ntorch.ops.aten.add\ntorch.ops.load_library('x')\n"
    )
    assert list(checker.check_sources(noarch)) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("(nn.Module)", "", "Scale is no nn.Module"),
        (LAYER, LAYER + "    factor = 2\n", "class variable factor"),
        (LAYER, LAYER + "    factor: int = 2\n", "class variable factor"),
        (LAYER, LAYER + "    def __init__(self):\n        super().__init__()\n", "defines forward, __init__"),
        (LAYER, LAYER + "    def helper(self):\n        pass\n", "defines forward, helper"),
        (LAYER, "    pass\n", "defines nothing"),
    ],
)
def test_rules_of_layers(checker, noarch, old, new, rule):
    path = noarch / "torch-ext" / "moemb_plain" / "layers.py"
    edit(path, old, new)
    (finding,) = checker.check_sources(noarch)
    assert rule in finding.rule and str(path) in finding.where and finding.remedy


def test_layers_may_name_what_they_expect(checker, noarch):
    path = noarch / "torch-ext" / "moemb_plain" / "layers.py"
    edit(path, LAYER, "    weight: int\n    has_backward = False\n\n" + LAYER)
    assert list(checker.check_sources(noarch)) == []


def test_layers_must_be_there(checker, noarch):
    (noarch / "torch-ext" / "moemb_plain" / "layers.py").unlink()
    (finding,) = checker.check_sources(noarch)
    assert "has no `layers`" in finding.rule


@pytest.mark.parametrize("flag", ["-march=native", "-static-libstdc++", "-ffast-math"])
def test_flags_of_one_machine(checker, compiled, flag):
    edit(compiled / "build.toml", '"-fopenmp"', f'"{flag}"')
    (finding,) = checker.check_sources(compiled)
    assert finding.rule == f"[base] uses {flag}"


def test_unlisted_sources(checker, compiled):
    (compiled / "csrc" / "forgotten.cpp").write_text("")
    (finding,) = checker.check_sources(compiled)
    assert finding.where.endswith("csrc/forgotten.cpp") and "not listed" in finding.rule


def test_a_fixed_namespace_in_a_binding(checker, compiled):
    path = compiled / "torch-ext" / "torch_binding_scale.cpp"
    path.write_text(path.read_text() + "\nSTABLE_TORCH_LIBRARY_FRAGMENT(moemb, m) {}\n")
    (finding,) = checker.check_sources(compiled)
    assert "fixed namespace 'moemb'" in finding.rule


def test_an_invalid_build_toml_is_one_finding(checker, compiled):
    edit(compiled / "build.toml", "edition = 5", "edition = 99")
    (finding,) = checker.check_sources(compiled)
    assert finding.where.endswith("build.toml")


@pytest.fixture
def build(toy_build, tmp_path) -> Path:
    """A staged toy that a test may damage."""
    return Path(
        shutil.copytree(toy_build, tmp_path / "built" / "moemb-toy", ignore=shutil.ignore_patterns(".objects"))
    )


def variant(repo: Path) -> Path:
    return repo / "build" / "torch-stable-abi210-cpu-x86_64-linux"


@pytest.fixture
def without_routes(checker, monkeypatch):
    """Builds are checked without loading them, which takes another process."""
    done = type("Done", (), {"returncode": 0, "stdout": "", "stderr": ""})
    run = checker.subprocess.run
    monkeypatch.setattr(checker.subprocess, "run", lambda a, **k: done if "routes.py" in str(a) else run(a, **k))


def test_a_staged_build_passes_and_its_library_is_portable(checker, build, without_routes):
    assert list(checker.check_builds(build)) == []


@pytest.mark.parametrize("family", ["GLIBC", "GLIBCXX", "CXXABI"])
def test_symbols_beyond_the_ceiling(checker, build, without_routes, monkeypatch, family):
    monkeypatch.setitem(checker.CEILINGS, family, (1, 0))
    findings = list(checker.check_builds(build))
    assert findings and all(f"of {family}_" in finding.rule for finding in findings)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda folder: (folder / "layers.py").write_text("x = 1\n"), "layers.py"),
        (lambda folder: (folder / "extra.py").write_text(""), "extra.py"),
        (lambda folder: (folder / "registration.py").unlink(), "registration.py"),
        (lambda folder: (folder / "metadata.json").unlink(), "metadata.json"),
        (lambda folder: edit(folder / "metadata.json", '"version": 1', '"version": 2'), "build.toml says otherwise"),
        (lambda folder: edit(folder / "metadata.json", '"type": "cpu"', '"type": "cuda"'), "its backend"),
    ],
)
def test_damaged_builds(checker, build, without_routes, damage, rule):
    damage(variant(build))
    (finding,) = checker.check_builds(build)
    assert rule in finding.rule and "stage.py" in finding.remedy


def test_a_build_that_does_not_load_is_a_finding(checker, build):
    """Every file is as its digest says, and still it does not run."""
    import stage

    folder = variant(build)
    (folder / "layers.py").write_text("raise RuntimeError('no layers today')\n")
    settings = checker.read_settings(build)
    identifier = "_moemb_toy_cpu_damaged"
    stage.write_metadata(folder, settings, identifier, "cpu")
    (finding,) = checker.check_builds(build)
    assert "does not load by every route" in finding.rule and "no layers today" in finding.rule

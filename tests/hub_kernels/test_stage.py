"""The Nix-free stager, on toy repositories: what it builds runs, what it cannot build it says."""

import json
import os
import shutil
import threading
from pathlib import Path

import kernels
import pytest
import torch

from .toy_kernels import make_noarch


@pytest.fixture(scope="module")
def stager():
    import stage

    return stage


@pytest.fixture
def repo(toy_build, tmp_path, stager, monkeypatch) -> Path:
    """A copy with its objects; loading in another process, which costs seconds, is tested on its own."""
    monkeypatch.setattr(stager, "try_loading", lambda variant, backend: None)
    return Path(shutil.copytree(toy_build, tmp_path / "moemb-toy"))


@pytest.fixture(scope="module")
def toy(toy_build):
    return kernels.get_local_kernel(toy_build, backend="cpu")


def variant_of(repo: Path) -> Path:
    return repo / "build" / "torch-stable-abi210-cpu-x86_64-linux"


def test_every_kind_of_argument_arrives(toy):
    x, bias = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(toy.scale(x), x)
    torch.testing.assert_close(toy.scale(x, bias, 2.5, 4), x * 2.5 + 4 + bias)
    assert toy.scale(x, off=True).isnan().all()
    assert toy.scale(torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float32, 0),
        (torch.bfloat16, 1),
        (torch.float16, 2),
        (torch.int32, 3),
        (torch.int64, 4),
        (torch.int8, 255),
    ],
)
def test_dtypes_sizes_and_strides_arrive(toy, dtype, code):
    x = torch.zeros(6, 4, dtype=dtype)[:, :3]
    assert toy.ops.describe(x) == code * 1000 + 2 * 100 + 3 * 10 + 4


def test_a_storage_offset_is_part_of_the_pointer(toy):
    x = torch.arange(10.0)
    assert torch.equal(toy.scale(x[4:]), x[4:])


def test_a_status_becomes_an_error(toy):
    with pytest.raises(RuntimeError, match="scale: sizes of the arguments contradict each other"):
        toy.scale(torch.zeros(2), offset=-1)


def test_arguments_are_released(toy):
    x, bias = torch.randn(4), torch.randn(4)
    before = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, bias)]
    for _ in range(5):
        toy.scale(x, bias)
        with pytest.raises(RuntimeError):
            toy.scale(x, bias, offset=-1)
    assert [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, bias)] == before


def test_an_operator_can_be_traced(toy):
    def twice(x):
        out = torch.empty_like(x)
        toy.ops.scale(x, None, 2.0, 0, False, out)
        return out

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_fake_rules_can_be_registered_again(toy_build, tmp_path):
    """The same build in a second folder: its operators are there already."""
    copy = Path(shutil.copytree(toy_build, tmp_path / "copy"))
    other = kernels.get_local_kernel(copy, backend="cpu")
    assert torch.equal(other.scale(torch.ones(2)), torch.ones(2))


def test_staging_again_builds_nothing(repo, stager, capsys):
    stamp = (variant_of(repo) / "metadata.json").stat().st_mtime_ns
    assert stager.stage(repo) == [variant_of(repo)]
    assert capsys.readouterr().out == ""
    assert (variant_of(repo) / "metadata.json").stat().st_mtime_ns == stamp


def test_two_at_once_build_once(repo, stager, tmp_path, monkeypatch, capsys):
    """As two processes of a test run would: the second waits, and finds the build of the first."""
    (repo / "csrc" / "scale.cpp").write_text((repo / "csrc" / "scale.cpp").read_text() + "\n")
    built, fill, installed = [], stager._fill, []

    def counted(scratch, *rest):
        built.append(scratch)
        return fill(scratch, *rest)

    monkeypatch.setattr(stager, "_fill", counted)
    threads = [
        threading.Thread(target=lambda: installed.append(stager.install(repo, tmp_path / "env"))),
        threading.Thread(target=lambda: installed.append(bool(stager.stage(repo)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert installed == [True, True] and len(built) == 1
    assert kernels.get_local_kernel(repo, backend="cpu").scale(torch.ones(1)).item() == 1


@pytest.mark.parametrize(
    ("changed", "compiled"),
    [
        ("csrc/scale.h", {"torch_binding.cpp", "torch_binding_scale.cpp", "scale.cpp"}),
        ("csrc/scale.cpp", {"torch_binding.cpp", "scale.cpp"}),
        ("torch-ext/moemb_toy/__init__.py", {"torch_binding.cpp"}),  # it holds the namespace, which always changes
    ],
)
def test_a_change_compiles_what_depends_on_it(repo, stager, capsys, changed, compiled):
    path = repo / changed
    path.write_text(path.read_text() + "\n")
    stager.stage(repo)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {Path(words[1]).name for words in lines if words[0] == "compiling"} == compiled


def test_a_changed_file_in_the_build_is_put_right(repo, stager):
    damaged = variant_of(repo) / "layers.py"
    text = damaged.read_text()
    damaged.write_text(text + "x = 1\n")
    stager.stage(repo)
    assert damaged.read_text() == text


def test_python_caches_do_not_count_as_damage(repo, stager, capsys):
    (variant_of(repo) / "__pycache__").mkdir()
    (variant_of(repo) / "__pycache__" / "layers.cpython-311.pyc").write_bytes(b"x")
    stager.stage(repo)
    assert capsys.readouterr().out == ""


def test_a_compile_error_is_shown_and_leaves_the_old_build(repo, stager):
    (repo / "csrc" / "scale.cpp").write_text("int broken(")
    with pytest.raises(stager.StageError, match=r"csrc/scale.cpp does not compile:(.|\n)*expected"):
        stager.stage(repo)
    assert kernels.get_local_kernel(repo, backend="cpu").scale(torch.ones(1)).item() == 1
    assert not list((repo / "build").glob(".staging*"))


def test_a_missing_symbol_is_found(toy_build, stager, tmp_path):
    """Linking a shared library does not notice; only loading does."""
    repo = Path(shutil.copytree(toy_build, tmp_path / "moemb-toy"))
    build = repo / "build.toml"
    build.write_text(build.read_text().replace('"csrc/scale.cpp", ', ""))
    with pytest.raises(stager.StageError, match=r"does not load:(.|\n)*undefined symbol: toy_scale"):
        stager.stage(repo)


def test_sources_that_nobody_lists_are_named(repo, stager, capsys):
    (repo / "csrc" / "forgotten.cpp").write_text("")
    stager.stage(repo)
    assert "build.toml does not list csrc/forgotten.cpp" in capsys.readouterr().err


def test_sources_can_be_left_out_aloud(repo, stager, capsys):
    stager.stage(repo, leave_out=["torch-ext/*_scale.cpp", "csrc/scale.cpp"])
    assert "LEFT OUT csrc/scale.cpp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("csrc/scale.cpp", "csrc/gone.cpp", r"\[base\] lists csrc/gone.cpp, which does not exist"),
        ("edition = 5", "edition = 99", "build.toml: .*edition"),
        ('name = "moemb-toy"', 'name = "moemb-other"', "moemb_other/__init__.py: there is no such file"),
    ],
)
def test_mistakes_in_build_toml(repo, stager, old, new, message):
    build = repo / "build.toml"
    build.write_text(build.read_text().replace(old, new))
    with pytest.raises(stager.StageError, match=message):
        stager.stage(repo)


def status_of(prefix: Path) -> dict:
    return json.loads((prefix / "share/moemb/kernels/moemb-toy/status.json").read_text())


def test_installing(repo, stager, tmp_path, capsys):
    prefix = tmp_path / "env"
    assert stager.install(repo, prefix)
    target = prefix / "share/moemb/kernels/moemb-toy/build" / variant_of(repo).name
    assert stager.is_current(target, json.loads((target / "metadata.json").read_text())["id"])
    assert status_of(prefix)["state"] == "ok"
    stamp = target.stat().st_ino
    capsys.readouterr()
    assert stager.install(repo, prefix) and capsys.readouterr().out == "" and target.stat().st_ino == stamp

    (repo / "csrc" / "scale.cpp").write_text("int broken(")
    assert not stager.install(repo, prefix)
    assert "does not compile" in status_of(prefix)["message"] and status_of(prefix)["state"] == "failed"
    assert not target.exists()  # it would not be the build of these sources


def test_installing_without_a_compiler(repo, stager, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not stager.install(repo, tmp_path / "env")
    (line,) = capsys.readouterr().out.splitlines()
    assert "no C++ compiler 'no-such-compiler'" in line and "PyTorch path" in line
    assert status_of(tmp_path / "env")["state"] == "no-compiler"


def test_exit_status(repo, stager, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stager, "ROOT", repo.parent)
    arguments = ["--install", "--prefix", str(tmp_path / "env"), "moemb-toy"]
    assert stager.main(arguments) == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert stager.main(arguments) == 3
    assert stager.main(["moemb-toi"]) == 1
    assert "there is no kernel repository 'moemb-toi'; there are moemb-toy" in capsys.readouterr().err


def test_a_noarch_repository_gets_a_variant_per_backend(stager, tmp_path, monkeypatch):
    """No compiler is asked for; the CUDA variant loads for CPU tensors as well."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    repo = make_noarch(tmp_path / "moemb-plain")
    variants = stager.stage(repo)
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    module = kernels.get_local_kernel(repo, backend="cpu")
    assert torch.equal(module.double(torch.ones(2)), torch.full((2,), 2.0))
    metadata = json.loads((variants[1] / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda"} and metadata["version"] == 3
    assert metadata["digest"]["files"].keys() == {"__init__.py", "_ops.py", "layers.py", "moemb_plain/__init__.py"}
    assert os.path.samefile(variants[0].parent, repo / "build")

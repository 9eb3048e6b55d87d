"""Where a Chromium is for the tests of the web page. As a program, which `make test` calls, it installs one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The program `$MOEMB_CHROMIUM` names, one on the PATH, or Playwright's own; `None` when there is none."""
    named = os.environ.get("MOEMB_CHROMIUM")
    if named:
        return named
    on_path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if on_path:
        return on_path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).is_file() else None


def install() -> bool:
    """Installs Chromium: on Debian and Ubuntu as root by apt-get, elsewhere Playwright's own build."""
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        packages = ["chromium", "fonts-noto-color-emoji"]
        commands = [["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]]
        if all(subprocess.run(command, env=environment).returncode == 0 for command in commands):
            return True
    return subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"]).returncode == 0


if __name__ == "__main__":
    if find_chromium() is None and not (install() and find_chromium()):
        sys.exit(
            "no Chromium could be installed; install one yourself, or let MOEMB_CHROMIUM name it: "
            "tests/trainers/test_app_browser.py fails without"
        )
    print(f"Chromium for the tests: {find_chromium()}")

"""The code blocks of README.md and docs/."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGES = sorted(["README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))])
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, int]]:
    """Language, text and first line of every fenced block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(match[2], match[3], text[: match.start()].count("\n") + 1) for match in _BLOCK.finditer(text)]


def python_of(page: str) -> list[tuple[str, int]]:
    return [(text, line) for language, text, line in blocks(page) if language == "python"]


def commands() -> list[tuple[str, str]]:
    """Every command line of every `sh` block, without its comment, with the page it stands on."""
    found = {}
    for page in PAGES:
        for language, text, _ in blocks(page):
            if language == "sh":
                for line in text.splitlines():
                    command = re.sub(r"\s+#\s.*", "", line).strip()
                    if command:
                        found.setdefault(command, page)
    return list(found.items())

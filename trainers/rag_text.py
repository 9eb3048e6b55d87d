"""Texts of every kind as passages short enough to be found by what they say."""

import codecs
import re
from html.parser import HTMLParser


_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
_BLOCK_TAGS = frozenset(
    ("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "figure", "footer",
     "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section",
     "table", "td", "th", "tr", "ul")
)  # fmt: skip
_SILENT_TAGS = frozenset(("script", "style", "template", "noscript", "svg"))


def decode_text(data: bytes) -> str:
    """
    Decodes a text file: by its byte order mark, else as UTF-8, else as Windows-1252.

    Args:
        data (`bytes`): the file.

    Returns:
        `str`: the text, with `\\n` line ends.

    Raises:
        ValueError: the file is binary.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return _unix_lines(data.decode(encoding, "replace"))
    if b"\0" in data[:65536]:
        raise ValueError("it holds zero bytes, so it is no text: give it the extension of what it is")
    try:
        return _unix_lines(data.decode("utf-8"))
    except UnicodeDecodeError:
        return _unix_lines(data.decode("cp1252", "replace"))


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


class _Words(HTMLParser):
    """Collects what a browser would show."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag, attrs):
        if tag in _SILENT_TAGS:
            self._silent += 1
        elif tag in _BLOCK_TAGS:
            self.parts.append("\n\n" if tag != "br" else "\n")

    def handle_endtag(self, tag):
        if tag in _SILENT_TAGS:
            self._silent = max(0, self._silent - 1)
        elif tag in _BLOCK_TAGS:
            self.parts.append("\n\n")

    def handle_data(self, data):
        if not self._silent:
            # Line ends inside a paragraph are spaces in HTML.
            self.parts.append(re.sub(r"\s+", " ", data))


def html_to_text(source: str) -> str:
    """Returns the words that a browser would show, paragraphs apart by blank lines, without scripts and styles."""
    words = _Words()
    words.feed(source)
    words.close()
    return "".join(words.parts)


def split_passages(text: str, most: int = 600) -> list[str]:
    """
    Cuts a text into passages: whole paragraphs together while they fit, a longer one at its sentences, and only a
    sentence that is longer still between words.

    Args:
        text (`str`): the text.
        most (`int`, *optional*, defaults to 600): most characters of a passage.

    Returns:
        `list[str]`: passages in order, without blank ones; nothing of the text but white space is lost.
    """
    passages: list[str] = []
    current = ""
    for piece, separator in _pieces(text, most):
        joined = f"{current}{separator}{piece}" if current else piece
        if len(joined) <= most:
            current = joined
            continue
        passages.append(current)
        current = piece
    return [*passages, current] if current else passages


def _pieces(text: str, most: int):
    """Yields pieces of at most `most` characters with what joins each to the piece before it."""
    for paragraph in _BLANK_LINES.split(text):
        paragraph = paragraph.strip()
        if not paragraph:
            continue
        if len(paragraph) <= most:
            yield paragraph, "\n\n"
            continue
        separator = "\n\n"
        for sentence in filter(None, (part.strip() for part in _SENTENCE_END.split(paragraph))):
            for part in _between_words(sentence, most):
                yield part, separator
                separator = " "


def _between_words(sentence: str, most: int):
    while len(sentence) > most:
        cut = sentence.rfind(" ", most // 2, most + 1)
        cut = cut if cut > 0 else most
        yield sentence[:cut].rstrip()
        sentence = sentence[cut:].lstrip()
    if sentence:
        yield sentence

"""PDFs by PDFium: pages drawn and their text layer, safe to use from several threads."""

import threading

import numpy as np


# PDFium must not be entered by two threads.
_PDFIUM = threading.Lock()


class UnreadableError(ValueError):
    """A file that cannot be indexed. The message says why, without its name."""


class Pdf:
    """
    An open PDF, a context manager.

    Args:
        data (`bytes`): the file.

    Raises:
        UnreadableError: it is broken or wants a password.
    """

    def __init__(self, data: bytes):
        import pypdfium2

        try:
            with _PDFIUM:
                self._document = pypdfium2.PdfDocument(data)
                self.pages = len(self._document)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                raise UnreadableError("it wants a password: save it without one") from error
            raise UnreadableError(f"it is no PDF that can be read ({error})") from error

    def __enter__(self) -> "Pdf":
        return self

    def __exit__(self, *_):
        with _PDFIUM:
            self._document.close()

    def render(self, number: int, longer_side: int) -> np.ndarray:
        """
        Draws a page.

        Args:
            number (`int`): page, from 1.
            longer_side (`int`): pixels of the longer side.

        Returns:
            `np.ndarray`: uint8 `[H, W, 3]`.

        Raises:
            UnreadableError: there is no such page, or it cannot be drawn.
        """
        if not 1 <= number <= self.pages:
            raise UnreadableError(f"it has pages 1 to {self.pages}, not {number}")
        try:
            with _PDFIUM:
                page = self._document[number - 1]
                try:
                    bitmap = page.render(scale=longer_side / max(*page.get_size(), 1.0))
                    picture = np.array(bitmap.to_pil().convert("RGB"))
                    bitmap.close()
                finally:
                    page.close()  # not left to the garbage collector, which knows nothing of the lock
            return picture
        except Exception as error:
            raise UnreadableError(f"it cannot be drawn ({type(error).__name__}: {error})") from error

    def text(self, number: int) -> str:
        """Returns the text layer of a page (from 1), empty when it has none or it is broken."""
        try:
            with _PDFIUM:
                page = self._document[number - 1]
                try:
                    layer = page.get_textpage()
                    text = layer.get_text_bounded()
                    layer.close()
                finally:
                    page.close()
        except Exception:
            return ""
        # PDFium marks a hyphen at the end of a line by U+FFFE.
        return text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "-")

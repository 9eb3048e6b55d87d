"""Searching an index by text, picture, page or clip, at any stop of the compute dial."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEMBError
from .rag_encoder import Encoder, Spent
from .rag_files import kind_of_name
from .rag_pdf import Pdf, UnreadableError
from .rag_readers import MODALITIES, ReadSettings, load_picture
from .rag_store import Hit, Store
from .rag_text import decode_text


_AGREEMENT = 10


class QueryError(MoEMBError, ValueError):
    """A query that cannot be answered. The message says what to ask instead."""


@dataclass(frozen=True)
class Query:
    """
    What is looked for: a text, a file, both together, or more of what was found.

    Args:
        text (`str`, *optional*): words.
        file (`Path`, *optional*): a picture, a video, a PDF or a text file.
        page (`int`, *optional*, defaults to 1): page of the PDF.
        like (`str`, *optional*): id of a result; everything else is then left out.
    """

    text: str = ""
    file: Path | None = None
    page: int = 1
    like: str = ""


@dataclass(frozen=True)
class Answer:
    """
    What was found, and what that took.

    Args:
        hits (`list[Hit]`): best first.
        pool (`int`): units that were ranked.
        spent (`list[Spent]`): embedding the query at the chosen stop, then at the others that were compared, full
            compute among them; empty for "more like this", which embeds nothing.
        agreement (`list[int]`): for each of these, how many of its best `agreement_of` results are among those of full
            compute.
        agreement_of (`int`): results that are compared.
        prepared (`float`): seconds to decode and tokenize the query.
        searched (`float`): seconds to rank.
    """

    hits: list[Hit]
    pool: int
    spent: list[Spent] = field(default_factory=list)
    agreement: list[int] = field(default_factory=list)
    agreement_of: int = 0
    prepared: float = 0.0
    searched: float = 0.0


class Searcher:
    """
    Answers queries. Threads may share it.

    Args:
        store (`Store`): the index.
        encoder (`Encoder`): embeds queries.
        settings (`ReadSettings`, *optional*): how a page that is asked with is drawn.
    """

    def __init__(self, store: Store, encoder: Encoder, settings: ReadSettings | None = None):
        self.store, self.encoder, self.settings = store, encoder, settings or ReadSettings()

    def search(
        self,
        query: Query | str,
        results: int = 24,
        modalities: Sequence[str] = MODALITIES,
        stop: int = 0,
        folder: str = "",
        compare: bool = False,
    ) -> Answer:
        """
        Answers a query.

        Args:
            query (`Query` or `str`): what is looked for.
            results (`int`, *optional*, defaults to 24): most results.
            modalities (`Sequence[str]`, *optional*): what may be found.
            stop (`int`, *optional*, defaults to 0): index of the stop in `encoder.stops`; 0 is full compute.
            folder (`str`, *optional*): only files below it.
            compare (`bool`, *optional*, defaults to `False`): measure every stop, not only the chosen one and full
                compute.

        Returns:
            [`Answer`]

        Raises:
            QueryError: nothing is asked, a file cannot be read, or a value is out of range.
        """
        query = Query(query) if isinstance(query, str) else query
        self._check(results, modalities, stop)
        counts = self.store.counts()
        pool = sum(counts[name] for name in modalities)
        if query.like:
            return self._like(query.like, results, modalities, folder, pool)
        item = self._item(query)
        stops = self.encoder.stops
        chosen = list(dict.fromkeys([stop, *(range(len(stops)) if compare else [0])]))
        try:
            spent, prepared = self.encoder.query(item, [stops[index] for index in chosen])
        except ValueError as error:
            raise QueryError(f"the query cannot be embedded: {str(error).removeprefix('item 0: ')}") from error
        started = time.perf_counter()
        hits = self.store.search(spent[0].vector, results, modalities, folder)
        searched = time.perf_counter() - started
        most = min(_AGREEMENT, len(hits))
        found = [{hit.id for hit in self.store.search(one.vector, most, modalities, folder)} for one in spent]
        full = found[chosen.index(0)]
        return Answer(hits, pool, spent, [len(full & ids) for ids in found], most, prepared, searched)

    def _check(self, results: int, modalities: Sequence[str], stop: int) -> None:
        if results < 1:
            raise QueryError(f"results is {results}, but must be at least 1")
        unknown = [name for name in modalities if name not in MODALITIES]
        if unknown:
            raise QueryError(f"there is no modality {unknown[0]!r}; there are {', '.join(MODALITIES)}")
        if not 0 <= stop < len(self.encoder.stops):
            raise QueryError(f"the dial has stops 0 to {len(self.encoder.stops) - 1}, not {stop}")

    def _like(self, identity: str, results: int, modalities: Sequence[str], folder: str, pool: int) -> Answer:
        row = self.store.get(identity, ["vector"])
        if row is None:
            raise QueryError("what was to be compared with is no longer in the index; search again")
        started = time.perf_counter()
        hits = self.store.search(np.asarray(row["vector"], np.float32), results + 1, modalities, folder)
        searched = time.perf_counter() - started
        return Answer([hit for hit in hits if hit.id != identity][:results], pool, searched=searched)

    def _item(self, query: Query) -> Any:
        text = " ".join(query.text.split())
        if query.file is None:
            if not text:
                raise QueryError("type something, or attach a picture, a PDF or a clip")
            return text
        try:
            item = self._file_item(query)
        except (UnreadableError, OSError) as error:
            raise QueryError(f"'{query.file.name}' cannot be asked with: {error}") from error
        if text:
            item["text"] = f"{text}\n{item['text']}" if "text" in item else text
        return item

    def _file_item(self, query: Query) -> dict[str, Any]:
        kind = kind_of_name(query.file.name)
        if kind == "image":
            return {"image": load_picture(query.file)}
        if kind == "clip":
            return {"video": query.file}
        if kind == "text":
            try:
                return {"text": decode_text(query.file.read_bytes())[: self.settings.passage_characters]}
            except ValueError as error:
                raise UnreadableError(str(error)) from error
        if kind != "pdf":
            raise UnreadableError("pictures, videos, PDFs and texts can be")
        with Pdf(query.file.read_bytes()) as document:
            return {"image": document.render(query.page, self.settings.page_pixels)}

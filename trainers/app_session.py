"""What the search page works on: index, model, and a thread that keeps the index in step with the folder."""

import logging
import threading

from .errors import MoEMBError
from .rag_encoder import Encoder
from .rag_index import Indexer
from .rag_search import Searcher
from .rag_store import Store


logger = logging.getLogger(__name__)


class Session:
    """
    Index, searcher and background indexing of one folder.

    Args:
        store (`Store`): the index.
        encoder (`Encoder`): the model.
        indexer (`Indexer`): brings the index up to date.
        searcher (`Searcher`): answers.
        watch (`float`, *optional*, defaults to 30.0): seconds between two looks at the folder; 0 looks only when
            asked.
    """

    def __init__(self, store: Store, encoder: Encoder, indexer: Indexer, searcher: Searcher, watch: float = 30.0):
        self.store, self.encoder, self.indexer, self.searcher = store, encoder, indexer, searcher
        self.watch = watch
        self.error = ""
        self._wake = threading.Event()
        self._end = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to index in the background, and keeps looking for changes."""
        self._thread = threading.Thread(target=self._run, name="moemb-indexing", daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Has the folder looked at without waiting for the next time."""
        self._wake.set()

    def close(self) -> None:
        """Ends indexing after the current batch and gives the index free."""
        self._end = True
        self.indexer.stop()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while not self._end:
            try:
                self.indexer.update()
                self.error = ""
            except MoEMBError as error:
                # The folder may come back and the disk may be freed; what is indexed stays searchable meanwhile.
                self.error = str(error)
            except Exception as error:
                logger.exception("Indexing failed.")
                self.error = f"indexing failed ({type(error).__name__}: {error}); the next look tries again"
            self._wake.wait(self.watch or None)
            self._wake.clear()

"""Serves the search page, thumbnails, and the originals of what is in the index; nothing else of the disk."""

import io
import mimetypes
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from fastapi.responses import FileResponse, PlainTextResponse, Response
from PIL import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .app_page import CSS, JS, Page, theme
from .app_session import Session
from .errors import MoEMBError
from .rag_files import kind_of_name


_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A browser must not run what lies in somebody's folder: what it could is sent as text.
_MEDIA_TYPES = {"pdf": "application/pdf", "text": "text/plain; charset=utf-8"}
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, max-age=300"}
_MAX_UPLOAD = "1gb"


class AddressError(MoEMBError, OSError):
    """The page cannot be served at an address. The message names it and the remedy."""


def build_app(session: Session, results: int = 24, host: str = "127.0.0.1") -> FastAPI:
    """
    Builds the web application.

    Args:
        session (`Session`): index, model and background indexing; started and closed with the application.
        results (`int`, *optional*, defaults to 24): cards shown at once.
        host (`str`, *optional*): where it listens. On a loopback address only requests for this machine's own names
            are answered, so that a web page elsewhere cannot read the index by a name that it points here.

    Returns:
        `FastAPI`: the page at `/`, `thumbnail/<id>` and `original/<id>`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        session.start()
        yield
        session.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    if host in _LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, "[::1]"])

    @app.get("/thumbnail/{identity}")
    def thumbnail(identity: str, still: bool = False) -> Response:
        row = session.store.get(identity, ["thumbnail"])
        if row is None or not row["thumbnail"]:
            return _gone()
        data = _first_frame(row["thumbnail"]) if still else row["thumbnail"]
        return Response(data, media_type="image/webp", headers=_HEADERS)

    @app.get("/original/{identity}")
    def original(identity: str) -> Response:
        return _original(session, identity)

    blocks = Page(session, results).build()
    return gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        theme=theme(),
        css_paths=CSS,
        js=JS.read_text(encoding="utf-8"),
        head='<meta name="color-scheme" content="light dark">',
        footer_links=["api"],
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        max_file_size=_MAX_UPLOAD,
        server_name=host,
    )


def _gone() -> Response:
    return PlainTextResponse("It is no longer in the index. Go back and search again.", status_code=404)


def _first_frame(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.convert("RGB").save(buffer, "WEBP", quality=80)
    return buffer.getvalue()


def _original(session: Session, identity: str) -> Response:
    row = session.store.get(identity, ["path"])
    if row is None:
        return _gone()
    path: Path = session.indexer.root / row["path"]
    kind = kind_of_name(row["path"])
    if not path.is_file() or kind is None:
        return _gone()
    media = _MEDIA_TYPES.get(kind) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return FileResponse(
        path, media_type=media, filename=path.name, content_disposition_type="inline", headers=_HEADERS
    )


def free_port(host: str, port: int) -> int:
    """
    Makes sure of an address before a model is loaded for it.

    Args:
        host (`str`): name or address to listen at.
        port (`int`): its port; 0 for any that is free.

    Returns:
        `int`: the port.

    Raises:
        AddressError: it is taken, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressError(
                f"the page cannot be served at {host}:{port} ({error.strerror or error}); give another --port (0 "
                "takes any that is free) or --host"
            ) from error
        return probe.getsockname()[1]


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serves the application until it is interrupted."""
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=3)

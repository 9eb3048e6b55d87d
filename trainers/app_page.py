"""The search page: one box for words and files, filters, the compute dial, and cards of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from .app_cards import (
    PLURALS,
    alert_html,
    comparison_html,
    measured_html,
    report_html,
    results_html,
    status_html,
)
from .app_session import Session
from .rag_files import KINDS, kind_of_name
from .rag_readers import MODALITIES
from .rag_search import Query, QueryError


CSS = Path(__file__).with_name("app_page.css")
JS = Path(__file__).with_name("app_page.js")
TITLE = "MoEMB search"
_REFRESH_SECONDS = 1.5
_UPLOAD_SECONDS = 3600
# Buttons inside the cards are HTML; their clicks reach Python as an event of the component around them.
_CARD_CLICKS = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-like]");
  if (button) trigger("select", {like: button.dataset.like});
});
"""


class Page:
    """
    Builds the page and answers its events.

    Args:
        session (`Session`): index, model and background indexing.
        results (`int`, *optional*, defaults to 24): cards shown at once.
    """

    def __init__(self, session: Session, results: int = 24):
        self.session, self.results = session, results
        self.stops = session.encoder.stops

    def build(self) -> gr.Blocks:
        """Returns the page, a `gradio.Blocks`; give it `theme()`, `CSS` and `JS` when it is mounted."""
        with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(_UPLOAD_SECONDS, _UPLOAD_SECONDS)) as page:
            gr.HTML(f"<h1>{TITLE}</h1>", elem_classes="moemb-title")
            status = gr.HTML(self.status())
            box = gr.MultimodalTextbox(
                placeholder="Describe it, or drop a picture, a PDF or a clip here",
                label="Search by words, by a picture, a page or a clip",
                show_label=False,
                container=False,
                file_types=sorted({extension for extensions in KINDS.values() for extension in extensions}),
                file_count="single",
                elem_id="moemb-box",
                submit_btn="Search",
                max_plain_text_length=100_000,
            )
            number = gr.Number(1, label="Page of the PDF", precision=0, minimum=1, visible=False, elem_id="moemb-page")
            with gr.Row(equal_height=True):
                kinds = gr.CheckboxGroup(
                    [(PLURALS[name], name) for name in MODALITIES],
                    value=list(MODALITIES),
                    label="Find",
                    elem_id="moemb-kinds",
                    min_width=280,
                )
                dial = gr.Slider(
                    0,
                    len(self.stops) - 1,
                    value=len(self.stops) - 1,
                    step=1,
                    label="Compute dial",
                    info=self.describe(len(self.stops) - 1),
                    buttons=[],
                    elem_id="moemb-dial",
                    min_width=280,
                )
            measured = gr.HTML("", elem_id="moemb-measured", html_template='<div role="status">${value}</div>')
            results = gr.HTML("", elem_id="moemb-results", js_on_load=_CARD_CLICKS)
            # Apart from the results, which hide it: what is late for one can then not overwrite the other.
            sample = gr.HTML(self.sample(), elem_id="moemb-sample", js_on_load=_CARD_CLICKS)
            with gr.Accordion("What each setting of the dial costs", open=False, elem_id="moemb-compare"):
                compare = gr.Button("Measure them on this query", size="sm")
                table = gr.HTML("")
            with gr.Accordion("The index", open=False, elem_id="moemb-index"):
                report = gr.HTML(report_html(self.session.indexer.last))
                refresh = gr.Button("Look for changes now", size="sm")
            asked = gr.State(Query())
            self._wire(locals())
        return page

    def _wire(self, parts: dict[str, Any]) -> None:
        box, number, kinds, dial, asked = (parts[name] for name in ("box", "number", "kinds", "dial", "asked"))
        shown = [parts["results"], parts["measured"], asked]
        settings = [kinds, dial]
        box.change(self.attached, box, number, show_progress="hidden", api_visibility="private", queue=False)
        dial.change(lambda value: gr.update(info=self.describe(value)), dial, dial, show_progress="hidden",
                    api_visibility="private", queue=False)  # fmt: skip
        again = {"fn": self.again, "inputs": [asked, *settings], "outputs": shown, "api_visibility": "private"}
        # What was asked before must not answer after what is asked now.
        older = [
            part.change(**again, concurrency_limit=None, trigger_mode="always_last", queue=True)
            for part in (kinds, dial)
        ]
        ask = {"fn": self.ask, "inputs": [box, number, *settings], "outputs": shown, "concurrency_limit": None}
        box.submit(**ask, api_name="search", cancels=older)
        number.submit(**ask, api_visibility="private", cancels=older)
        for cards in (parts["results"], parts["sample"]):
            cards.select(
                self.like, settings, [*shown, box], api_visibility="private", concurrency_limit=None, cancels=older
            )
        parts["compare"].click(self.compare, [asked, *settings], parts["table"], api_visibility="private")
        parts["refresh"].click(self.session.look_now, None, None, api_visibility="private", queue=False)
        timer = gr.Timer(_REFRESH_SECONDS)
        news = gr.State("")
        timer.tick(self.tick, news, [parts["status"], parts["report"], parts["sample"], news],
                   show_progress="hidden", api_visibility="private", queue=False)  # fmt: skip

    def describe(self, value: float) -> str:
        """Returns what a position of the dial means; right is full compute."""
        return f"{self.stops[self._stop(value)].name[:1].upper()}{self.stops[self._stop(value)].name[1:]}"

    def _stop(self, value: float) -> int:
        return max(0, min(len(self.stops) - 1, len(self.stops) - 1 - int(value)))

    def status(self) -> str:
        """Returns the line under the title."""
        session = self.session
        return status_html(session.store.counts(), session.indexer.progress, str(session.indexer.root), session.error)

    def sample(self) -> str:
        """Returns cards of some items, for a page on which nothing was asked yet."""
        hits = self.session.store.sample(self.results)
        return results_html(hits, "From your folder", scored=False) if hits else _WELCOME

    def tick(self, news: str) -> tuple[Any, Any, Any, str]:
        """Brings status, report and sample up to date; silent when nothing changed."""
        status, report = self.status(), report_html(self.session.indexer.last)
        now = f"{hash((status, report))}"
        if now == news:
            return gr.skip(), gr.skip(), gr.skip(), news
        return status, report, self.sample(), now

    def attached(self, box: dict[str, Any] | None) -> Any:
        """Shows the page number while a PDF is attached."""
        files = (box or {}).get("files") or []
        return gr.update(visible=bool(files) and kind_of_name(files[0]) == "pdf")

    def ask(self, box: dict[str, Any] | None, page: float | None, kinds: Sequence[str], dial: float) -> tuple:
        """Answers the box: cards, what it took, and the query to ask again with other settings."""
        box = box or {}
        files = box.get("files") or []
        query = Query(box.get("text") or "", Path(files[0]) if files else None, int(page or 1))
        return self.again(query, kinds, dial) if query != Query() else ("", "", query)

    def again(self, query: Query, kinds: Sequence[str], dial: float) -> tuple:
        """Answers a query with the settings of the page."""
        if query == Query():
            return gr.skip(), gr.skip(), gr.skip()
        try:
            answer = self.session.searcher.search(query, self.results, kinds, self._stop(dial))
        except QueryError as error:
            return self._nothing(), alert_html(str(error)), query
        return results_html(answer.hits, self._heading(query)), measured_html(answer), query

    def like(self, event: gr.EventData, kinds: Sequence[str], dial: float) -> tuple:
        """Answers "more like this"."""
        return (*self.again(Query(like=str(event._data["like"])), kinds, dial), {"text": "", "files": []})

    def compare(self, query: Query, kinds: Sequence[str], dial: float) -> str:
        """Measures every stop of the dial on the query."""
        if query == Query():
            return alert_html("search for something first")
        try:
            answer = self.session.searcher.search(query, self.results, kinds, self._stop(dial), compare=True)
        except QueryError as error:
            return alert_html(str(error))
        return comparison_html(answer)

    def _heading(self, query: Query) -> str:
        if query.like:
            row = self.session.store.get(query.like, ["path", "place"])
            return f"More like {Path(row['path']).name}{', ' + row['place'] if row['place'] else ''}"
        words = f"“{' '.join(query.text.split())[:120]}”" if query.text.strip() else ""
        name = query.file.name if query.file else ""
        if kind_of_name(name) == "pdf":
            name += f", page {query.page}"
        return "Results for " + " with ".join(part for part in (words, name) if part)

    @staticmethod
    def _nothing() -> str:
        return '<div class="moemb-empty"><p>No results.</p></div>'


_WELCOME = (
    '<div class="moemb-empty"><h2>Indexing has begun</h2><p>Pictures, pages, texts and clips appear here as soon as '
    "they are indexed, and can be searched at once.</p></div>"
)


# The palette of app_page.css where Gradio's own parts are concerned: light and dark.
_LOOK = (
    ("body_background_fill", "#f6f5f1", "#14161b"),
    ("body_text_color", "#1d1f24", "#e9eaee"),
    ("body_text_color_subdued", "#5b606b", "#a3a9b6"),
    ("background_fill_primary", "#ffffff", "#1d2027"),
    ("background_fill_secondary", "#f6f5f1", "#14161b"),
    ("block_background_fill", "#ffffff", "#1d2027"),
    ("block_border_color", "#e2e0d8", "#2e323c"),
    ("border_color_primary", "#e2e0d8", "#2e323c"),
    ("block_label_text_color", "#1d1f24", "#e9eaee"),
    ("block_title_text_color", "#1d1f24", "#e9eaee"),
    ("block_info_text_color", "#5b606b", "#a3a9b6"),
    ("input_background_fill", "#ffffff", "#1d2027"),
    ("input_placeholder_color", "#6a6f7a", "#9aa0ad"),
    ("checkbox_label_background_fill", "#f1f0eb", "#262a33"),
    ("checkbox_label_background_fill_hover", "#e6eafb", "#252b40"),
    ("checkbox_label_background_fill_selected", "#e6eafb", "#252b40"),
    ("checkbox_label_text_color", "#1d1f24", "#e9eaee"),
    ("checkbox_background_color_selected", "#3a5bd9", "#5b7cf0"),
    ("slider_color", "#3a5bd9", "#8ea6ff"),
    ("button_secondary_background_fill", "#e6eafb", "#252b40"),
    ("button_secondary_background_fill_hover", "#d5dcf8", "#303a5c"),
    ("button_secondary_text_color", "#2b47b0", "#c4d0ff"),
)


def theme() -> gr.Theme:
    """Returns the page's theme. System fonts: nothing is fetched from elsewhere."""
    sans = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif"]
    colours = gr.themes.colors.indigo
    base = gr.themes.Base(
        primary_hue=colours,
        neutral_hue=gr.themes.colors.gray,
        font=sans,
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
        radius_size=gr.themes.sizes.radius_lg,
    )
    look: dict[str, str] = {}
    for name, light, dark in _LOOK:
        look |= {name: light, f"{name}_dark": dark}
    return base.set(**look)

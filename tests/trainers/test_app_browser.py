"""The search page in a real, headless Chromium: what people see, click and type."""

import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from moemb.trainers.rag_pdf import Pdf
from tests.chromium import find_chromium

from .app_process import HOSTILE, PAGES, App, fill_from_gallery
from .rag_samples import RED, pdf, png, write_video


# Screenshots to look at: MOEMB_SCREENSHOTS=DIR pytest tests/trainers/test_app_browser.py; `make screenshot` puts one
# into docs/assets/.
SCREENSHOTS = os.environ.get("MOEMB_SCREENSHOTS")
SECONDS = 30_000
PHONE = {"width": 390, "height": 844}
AFTERWARDS = "37 pictures, 3 pages, 4 texts, 6 clips"


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    base = tmp_path_factory.mktemp("app")
    fill_from_gallery(base / "data")
    with App(base / "data", base / "index") as app:
        yield app


@pytest.fixture(scope="module")
def browser():
    program = find_chromium()
    assert program, "there is no Chromium: `make test` installs one, or let MOEMB_CHROMIUM name it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, app, **options) -> Page:
    page = browser.new_page(viewport=options.pop("viewport", {"width": 1200, "height": 900}), **options)
    page.set_default_timeout(SECONDS)
    page.problems, page.asked = [], []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(app.url)
    expect(page.locator(".moemb-status")).to_contain_text("36 pictures, 3 pages, 5 texts, 6 clips", timeout=SECONDS)
    expect(page.locator(".moemb-results .card").first).to_be_visible(timeout=SECONDS)
    return page


@pytest.fixture
def page(browser, app):
    page = open_page(browser, app)
    yield page
    page.close()


def shoot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def search(page: Page, text: str) -> None:
    page.locator("#moemb-box textarea").fill(text)
    page.locator("#moemb-box textarea").press("Enter")
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text(f"“{text}”", timeout=SECONDS)


def attach(page: Page, path: Path) -> None:
    page.locator("#moemb-box input[type=file]").set_input_files(str(path))
    expect(page.locator("#moemb-box .thumbnail-item").first).to_be_visible(timeout=SECONDS)


def names(page: Page) -> list[str]:
    return page.locator(".card .name:visible").all_inner_texts()


@pytest.fixture(scope="module")
def oracle(app):
    """Ranks all pictures of the folder by products of vectors from `encode`."""
    from moemb.trainers.quickstart_model import load_model

    model, _ = load_model("moemb-mini")
    paths = sorted((app.data / "drawings").glob("*.png"))
    documents = model.encode_document(paths, normalize_embeddings=True)

    def rank(query):
        scores = documents @ model.encode_query(query, normalize_embeddings=True)
        order = np.argsort(-scores)
        return [paths[row].name for row in order], scores[order]

    return rank


def only(page: Page, *kinds: str) -> None:
    for kind in ("Pictures", "Pages", "Texts", "Clips"):
        page.get_by_role("checkbox", name=kind).set_checked(kind in kinds)


def test_the_first_page_needs_nothing_from_elsewhere(page, app):
    shoot(page, "first")
    expect(page.get_by_role("heading", name="MoEMB search")).to_be_visible()
    assert len(names(page)) == 24
    page.wait_for_function("[...document.images].filter(i => i.complete && i.naturalWidth > 0).length >= 4")
    assert {url.split("/")[2] for url in page.asked if url.startswith("http")} == {app.url.split("/")[2]}
    assert page.problems == []


def test_words_find_what_the_vectors_say(page, oracle):
    only(page, "Pictures")
    search(page, "a flag")
    expected, scores = oracle("a flag")
    assert names(page) == expected[:24]
    shown = [float(text) for text in page.locator("#moemb-results .card .score").all_inner_texts()]
    assert np.allclose(shown, scores[:24], atol=0.006)
    shoot(page, "words")


def test_a_picture_finds_pictures(page, app, oracle):
    only(page, "Pictures")
    path = sorted((app.data / "drawings").glob("*.png"))[7]
    attach(page, path)
    page.locator("#moemb-box .submit-button").click()
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text(path.name, timeout=SECONDS)
    assert names(page) == oracle(path)[0][:24] and names(page)[0] == path.name
    shoot(page, "picture")


def test_a_page_of_a_pdf_finds_that_page(page, app):
    expect(page.locator("#moemb-page")).to_be_hidden()
    attach(page, app.data / "three pages.pdf")
    number = page.get_by_label("Page of the PDF")
    expect(number).to_be_visible()
    only(page, "Pages")
    number.fill("2")
    page.locator("#moemb-box .submit-button").click()
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text("three pages.pdf, page 2", timeout=SECONDS)
    first = page.locator("#moemb-results .card").first
    expect(first.locator(".where")).to_contain_text("page 2 of 3")
    assert first.locator("a").get_attribute("href").endswith("#page=2")
    number.fill("9")
    number.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("it has pages 1 to 3, not 9", timeout=SECONDS)


def test_a_clip_finds_that_clip(page, app):
    path = sorted((app.data / "moving").glob("*.gif"))[2]
    # An attached GIF is a picture of its first frame; a clip is asked for as a video.
    only(page, "Clips")
    search(page, path.stem)
    assert len(names(page)) == 6
    page.locator("#moemb-results .card", has_text=path.name).get_by_role("button").click()
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text(f"More like {path.name}", timeout=SECONDS)
    assert path.name not in names(page) and len(names(page)) == 5


def test_a_video_can_be_asked_with(page, tmp_path):
    write_video(tmp_path / "asked.mp4", [RED, RED])
    attach(page, tmp_path / "asked.mp4")
    page.locator("#moemb-box .submit-button").click()
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text("asked.mp4", timeout=SECONDS)
    expect(page.locator("#moemb-measured")).to_contain_text("to embed the query with full compute")


def test_filters_and_the_dial_ask_again(page):
    search(page, "a boat")
    before = set(page.locator("#moemb-results .card .kind").all_inner_texts())
    assert len(before) > 1
    only(page, "Texts")
    expect(page.locator("#moemb-results .card .kind").first).to_have_text("text", timeout=SECONDS)
    page.wait_for_function(
        "[...document.querySelectorAll('#moemb-results .card .kind')].every(k => k.innerText === 'text')"
    )
    slider = page.locator("#moemb-dial input[type=range]")
    slider.focus()
    for _ in range(2):
        slider.press("ArrowLeft")
    expect(page.locator("#moemb-dial")).to_contain_text("2 of 4 experts")
    measured = page.locator("#moemb-measured")
    expect(measured).to_contain_text(
        re.compile(r"[\d.]+ m?s to embed the query with 2 of 4 experts · [\d.]+ m?s with full"), timeout=SECONDS
    )
    expect(measured).to_contain_text(re.compile(r"[\d.]+ m?s with full compute · [1-9]\d?% fewer FLOPs"))
    page.get_by_role("button", name="What each setting of the dial costs").click()
    page.get_by_role("button", name="Measure them on this query").click()
    rows = page.locator(".moemb-table tbody tr")
    expect(rows).to_have_count(5, timeout=SECONDS)
    saved = [int(cell.rstrip("%") or 0) for cell in page.locator(".moemb-table td:nth-child(3)").all_inner_texts()]
    assert saved == sorted(saved) and saved[0] == 0 and saved[-1] > saved[1] > 0
    page.locator(".moemb-table").scroll_into_view_if_needed()
    shoot(page, "dial")


def test_everything_by_keyboard(page, app):
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("harbour at dawn")
    page.keyboard.press("Enter")
    expect(page.locator("#moemb-results .moemb-heading")).to_contain_text("“harbour at dawn”", timeout=SECONDS)
    page.keyboard.press("ArrowDown")
    focused = "document.activeElement.closest('.card') && document.activeElement.getAttribute('href')"
    first = page.evaluate(focused)
    assert first == page.locator("#moemb-results .card a").first.get_attribute("href")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == page.locator("#moemb-results .card a").nth(1).get_attribute("href")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    only(page, "Texts")
    page.locator("#moemb-results .card", has_text="notes.md").locator("a").focus()
    with page.context.expect_page() as opened:
        page.keyboard.press("Enter")
    opened.value.wait_for_load_state()
    assert "left the harbour at dawn" in opened.value.inner_text("body")
    opened.value.close()


def test_names_and_texts_are_shown_and_never_run(page):
    only(page, "Texts")
    search(page, "{{1+1}} ${2+2} <b>mischief</b>")
    expect(page.locator("#moemb-results .card .name", has_text="{{7*7}}")).to_have_text(HOSTILE)
    assert page.title() == "MoEMB search" and page.locator("img[src=x]").count() == 0
    address = page.locator("#moemb-results .card", has_text="{{7*7}}").locator("a").get_attribute("href")
    response = page.request.get(page.url + address)
    assert response.headers["content-type"].startswith("text/plain")
    assert response.headers["x-content-type-options"] == "nosniff"


def test_only_what_is_indexed_is_served(page, app):
    inside = ("original/" + "0" * 32, "thumbnail/x'%20OR%20'1'='1", "original/..%2f..%2fetc%2fpasswd")
    for path in (*inside, "file=/etc/passwd", "gradio_api/file=/etc/passwd"):
        assert page.request.get(f"{app.url}/{path}").status in (403, 404)
    assert page.request.get(app.url, headers={"Host": "evil.example"}).status == 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_can_read_it(browser, app, scheme):
    page = open_page(browser, app, viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    search(page, "a yellow star")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    boxes = [box.bounding_box() for box in page.locator("#moemb-results .card button").all()[:4]]
    assert all(box["height"] >= 44 for box in boxes), "too small for a thumb"
    for selector in (".card .name", ".card .where", ".moemb-measured", ".moemb-status", ".card button"):
        assert contrast(page, selector) >= 4.5, selector
    shoot(page, f"phone-{scheme}")
    page.locator("#moemb-results .moemb-heading").scroll_into_view_if_needed()
    page.mouse.wheel(0, 500)
    shoot(page, f"phone-results-{scheme}")
    page.close()


def contrast(page: Page, selector: str) -> float:
    """The WCAG contrast ratio of an element's text with what is painted behind it."""
    colours = page.locator(selector).first.evaluate(
        """element => {
            const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
            const painted = (at) => parse(getComputedStyle(at).backgroundColor);
            let behind = element;
            while ((painted(behind)[3] ?? 1) === 0) behind = behind.parentElement;
            return [parse(getComputedStyle(element).color), painted(behind)];
        }"""
    )

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(rgb[:3]) / 255]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def test_two_searches_at_once(app):
    from gradio_client import Client

    queries = ["a boat", "a violin", "bread", "a star"]
    client = Client(app.url, verbose=False)

    def ask(text):
        cards, measured = client.predict({"text": text, "files": []}, 1, ["image", "text"], 4, api_name="/search")
        assert "ranked in" in measured
        return re.findall(r'class="name" title="([^"]*)"', cards)

    alone = {text: ask(text) for text in queries}
    together, errors = {}, []

    def work(text):
        try:
            together[text] = ask(text)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and together == alone and len({tuple(found) for found in alone.values()}) > 1


@pytest.mark.slow
def test_the_folder_changes_and_the_app_restarts(browser, tmp_path):
    data = tmp_path / "data"
    fill_from_gallery(data)
    with App(data, tmp_path / "index") as mine:
        page = open_page(browser, mine)
        page.get_by_role("button", name="The index").click()
        expect(page.locator("#moemb-index")).to_contain_text("2 files not indexed", timeout=SECONDS)
        page.locator(".moemb-skipped summary").click()
        expect(page.locator(".moemb-skipped")).to_contain_text("corrupt.pdf it is no PDF that can be read")
        expect(page.locator(".moemb-skipped")).to_contain_text("empty.png it is empty (0 bytes)")
        page.locator(".moemb-skipped").scroll_into_view_if_needed()
        shoot(page, "index")
        (data / "new red.png").write_bytes(png(RED))
        (data / "notes.md").unlink()
        expect(page.locator(".moemb-status")).to_contain_text(AFTERWARDS, timeout=SECONDS)
        mine.process.send_signal(signal.SIGKILL)
        mine.process.wait()
        page.close()
    with App(data, tmp_path / "index") as again:
        page = browser.new_page()
        page.goto(again.url)
        expect(page.locator(".moemb-status")).to_contain_text(AFTERWARDS, timeout=SECONDS)
        page.get_by_role("button", name="The index").click()
        expect(page.locator("#moemb-index")).to_contain_text("unchanged", timeout=SECONDS)
        assert "embedded" not in page.locator("#moemb-index").inner_text()
        page.close()


def test_the_samples_are_what_the_tests_say():
    with Pdf(pdf(PAGES)) as document:
        assert [document.text(number) for number in (1, 2, 3)] == PAGES

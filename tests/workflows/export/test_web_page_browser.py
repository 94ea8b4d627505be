"""The exported page in Chromium: the text of `toque generate`, without a network.

`fixtures/browser.py` says how to have accessibility checked, and pictures taken.
"""

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import toque
from fixtures.browser import MARKS, look, pages
from serving.known_recipe import FOODS, TITLE, taught
from toque.cooking.prompts import write_prompt
from toque.errors import DataError
from toque.models.loading.model_export import save_model
from toque.models.loading.provenance import Provenance
from toque.workflows.trained_model.model_codec import model_files

pytestmark = MARKS


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(params=["gpt2", "t5", "llama"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a model that knows a recipe by heart."""
    model, codec = taught(150 if request.param == "llama" else 300, request.param)
    record = Provenance(form="recipes", max_new_tokens=400)
    files, _ = model_files(codec, record, encoder=request.param == "t5")
    folder = tmp_path / request.param
    save_model(model.eval(), None, folder, card="", files=files, record=record)
    return folder


@pytest.fixture
def address(model: Path, tmp_path: Path) -> Iterator[str]:
    try:
        folder = toque.export(model, tmp_path / "soup", form="web", dtype="f32").folder
    except DataError as error:
        pytest.skip(str(error))
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def test_a_phone_writes_the_same_text_without_a_network(browser, address, model):
    wrong, hosts = [], set()

    def prepare(page) -> None:
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))

    with pages(browser, wrong) as open_page:
        page = open_page(address, "phone", "light", prepare)
        page.wait_for_selector("#go:not([disabled])")
        page.wait_for_selector("html[data-offline=ready]")
        page.context.set_offline(True)
        page.reload()
        page.wait_for_selector("#go:not([disabled])")
        page.fill("#dish", TITLE)
        page.click("#ingredients-input")
        for food in FOODS:
            page.keyboard.type(food)
            page.keyboard.press("Enter")
        page.evaluate("document.getElementById('temperature').value = 0")
        page.evaluate("""() => {
            navigator.clipboard.writeText = async (text) => (window.copied = text);
        }""")
        page.click("#go")
        page.wait_for_selector("#actions:not([hidden])")
        assert "per second" in page.inner_text("#speed")
        page.click("#copy")
        page.wait_for_function("window.copied")
        text = page.evaluate("window.copied")
        look(page, f"offline-{model.name}")
        assert not page.is_visible("#problem")
    prompt = write_prompt(TITLE, FOODS)
    (expected,) = toque.generate(model, [prompt], temperature=0.0)
    assert text == f"{TITLE}\n\n{expected.text.strip()}\n"
    assert "olive oil" in text
    assert hosts == {urlsplit(address).netloc}
    assert wrong == []

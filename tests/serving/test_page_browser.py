"""The page in Chromium, with a model that really writes.

Set AXE_CORE to the path of axe.min.js (npm's axe-core) to have accessibility checked, and
PAGE_SHOTS to a folder for pictures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.known_recipe import FOODS, TEXT, TITLE, served_models

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
    pytest.mark.timeout(900),
]
PATIENCE_MS = 240_000
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
LENGTHS = """() => {
  window.lengths = [];
  new MutationObserver(() => {
    const sheet = document.querySelector(".sheet[aria-busy=true] .written");
    if (sheet) window.lengths.push(sheet.textContent.length);
  }).observe(
    document.getElementById("sheets"), {subtree: true, childList: true, characterData: true}
  );
}"""
"""Notes how long the recipe is whenever it changes while it is being written."""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(serving) -> Iterator[str]:
    with serving(served_models(["soups", "other"])) as address:
        yield address


@pytest.fixture
def opened(browser, address):
    """A page of any size and colour scheme that fails the test on an error in its console."""
    contexts, wrong = [], []

    def open_page(size="wide", scheme="light", to=address):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: "Security Policy" in said.text and wrong.append(said.text))
        page.goto(to)
        page.wait_for_selector("#model option", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def ask(page, *, dish=TITLE, foods=FOODS) -> None:
    page.fill("#dish", dish)
    page.click("#ingredients-input")
    for food in foods:
        page.keyboard.type(food)
        page.keyboard.press("Enter")
    page.fill("#servings", "2")
    page.evaluate("document.getElementById('more').open = true")
    page.fill("#temperature", "0")
    page.click("#go")


def soon(found):
    """What a part of the page comes to be."""
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE_MS)
    return expect(found)


def finished(page) -> None:
    page.wait_for_selector(".sheet[aria-busy=false]")
    page.wait_for_selector(".shopping li")
    soon(page.locator("#go")).to_have_text("Write the recipe")


def texts(page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def look(page, name: str) -> None:
    """Check a state of the page with axe-core, and take its picture, where these are asked for."""
    if folder := os.environ.get("PAGE_SHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    if script := os.environ.get("AXE_CORE"):
        page.evaluate(Path(script).read_text(encoding="utf-8"))
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 10
        assert [(each["id"], each["nodes"][0]["target"]) for each in found["violations"]] == []


def test_a_recipe_is_written_scaled_and_kept(opened):
    page = opened()
    page.evaluate(LENGTHS)
    ask(page)
    finished(page)
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 5, "the text came at once"
    assert lengths == sorted(lengths)
    lines = TEXT.splitlines()
    assert texts(page, ".ingredients li") == [line.removeprefix("- ") for line in lines[1:5]]
    assert texts(page, ".steps li") == [line.partition(". ")[2] for line in lines[7:]]
    assert texts(page, ".asked li") == ["✓ lentils used", "✕ saffron missed"]
    assert texts(page, ".facts dt") == ["Nutrition", "Difficulty"]
    assert texts(page, ".shopping .amount") == ["1½ cups", "2 tablespoons", "3", ""]

    page.get_by_label("Servings of the shopping list").fill("6")
    page.keyboard.press("Enter")
    soon(page.locator(".shopping .amount").first).to_have_text("4½ cups")
    assert texts(page, ".shopping .amount") == ["4½ cups", "6 tablespoons", "9", ""]

    page.reload()
    assert texts(page, ".sheet") == []
    page.locator("#history").get_by_text(TITLE).click()
    finished(page)
    assert texts(page, ".ingredients li") == [line.removeprefix("- ") for line in lines[1:5]]
    assert page.input_value("#dish") == TITLE
    assert texts(page, "#ingredients li span") == list(FOODS)


def test_a_recipe_that_names_what_to_leave_out_is_written_again_and_said(opened):
    page = opened()
    page.fill("#avoid-input", "carrots, peanuts")
    ask(page)
    page.wait_for_selector(".notice:not([hidden])")
    assert texts(page, ".notice") == ["It still names carrots. Leave it out, or ask again."]
    finished(page)
    assert "✕ carrots to be left out, and there" in texts(page, ".asked li")


def test_the_keyboard_alone_is_enough(opened):
    page = opened()
    for _ in range(2):  # the link over the masthead, then the dish
        page.keyboard.press("Tab")
    page.keyboard.type(TITLE)
    page.keyboard.press("Tab")
    page.keyboard.type(f"{','.join(FOODS)},salt,")
    assert texts(page, "#ingredients li span") == [*FOODS, "salt"]
    page.keyboard.press("Backspace")
    assert texts(page, "#ingredients li span") == list(FOODS)
    page.evaluate("document.getElementById('temperature').value = 0")
    page.keyboard.press("Enter")
    finished(page)
    assert texts(page, "#status") == [f"{TITLE} by soups: 4 ingredients, 2 steps."]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_state_at_both_sizes(opened, size, scheme):
    page = opened(size, scheme)
    look(page, f"{size}-{scheme}-empty")
    page.evaluate("document.getElementById('more').open = true")
    page.select_option("#second", "other")
    ask(page)
    page.wait_for_selector(".sheet:nth-child(2)[aria-busy=false]")
    finished(page)
    page.locator(".verdict summary").first.click()
    look(page, f"{size}-{scheme}-two")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_full_server_and_one_that_is_gone_are_said_in_words(opened, serving):
    models = served_models(["soups", "other"])
    with serving(models, limits={"rows": 1, "queue": 0}) as narrow:
        page = opened(to=narrow)
        page.select_option("#second", "other")
        ask(page)  # two recipes, and room for one
        page.wait_for_selector("#problem:not([hidden])")
        assert texts(page, "#problem")[0].startswith("The kitchen is full")
        assert texts(page, "#problem")[0].endswith("Try again in 1 second.")
        finished(page)
        assert len(texts(page, ".sheet")) == 1
    page.click("#go")
    soon(page.locator("#problem")).to_contain_text("Is `toque serve` still running?")

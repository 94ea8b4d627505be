"""The page in Chromium, with a model that really writes.

`fixtures/browser.py` says how to have accessibility checked, and pictures taken.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.browser import MARKS, SIZES, look, pages, soon
from serving.known_recipe import FOODS, TEXT, TITLE, served_models
from toque.models.loading.provenance import OwnTask, Provenance
from toque.serving.batcher import ServedModels
from toque.workflows.trained_model.training_record import FOREIGN

pytestmark = MARKS
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
def address(serving) -> Iterator[str]:
    with serving(served_models(["soups", "other"])) as address:
        yield address


@pytest.fixture
def opened(browser, address):
    """A page of any size and colour scheme that fails the test on an error in its console."""
    wrong = []
    with pages(browser, wrong) as open_page:

        def open_here(size="wide", scheme="light", to=address):
            page = open_page(to, size, scheme)
            page.wait_for_selector("#model option", state="attached")
            return page

        yield open_here
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


def finished(page) -> None:
    page.wait_for_selector(".sheet[aria-busy=false]")
    page.wait_for_selector(".shopping li")
    soon(page.locator("#go")).to_have_text("Write the recipe")


def texts(page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def test_a_recipe_is_written_scaled_and_kept(opened):
    page = opened()
    page.evaluate(LENGTHS)
    ask(page)
    finished(page)
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 2, "the text came at once"
    assert lengths == sorted(lengths)
    lines = TEXT.splitlines()
    assert texts(page, ".ingredients li") == [
        line.removeprefix("- ") for line in lines[1:5]
    ]
    assert texts(page, ".steps li") == [line.partition(". ")[2] for line in lines[7:]]
    assert texts(page, ".requested li") == ["✓ lentils used", "✕ saffron missing"]
    assert texts(page, ".classes dt") == ["Nutrition", "Difficulty"]
    assert texts(page, ".shopping .amount") == ["1½ cups", "2 tablespoons", "3", ""]

    page.get_by_label("Servings of the shopping list").fill("6")
    page.keyboard.press("Enter")
    soon(page.locator(".shopping .amount").first).to_have_text("4½ cups")
    assert texts(page, ".shopping .amount") == ["4½ cups", "6 tablespoons", "9", ""]

    page.reload()
    assert texts(page, ".sheet") == []
    page.locator("#history").get_by_text(TITLE).click()
    finished(page)
    assert texts(page, ".ingredients li") == [
        line.removeprefix("- ") for line in lines[1:5]
    ]
    assert page.input_value("#dish") == TITLE
    assert texts(page, "#ingredients li span") == list(FOODS)


def test_a_recipe_that_names_what_to_leave_out_is_written_again_and_said(opened):
    page = opened()
    page.fill("#avoid-input", "carrots, peanuts")
    ask(page)
    page.wait_for_selector(".notice:not([hidden])")
    assert texts(page, ".notice") == [
        "The recipe still contains carrots. Leave it out, or write another one."
    ]
    finished(page)
    assert "✕ carrots unwanted" in texts(page, ".requested li")


def test_an_ingredient_of_the_steps_alone_is_marked_and_on_the_shopping_list(opened):
    page = opened()
    request = {"dish": TITLE, "style": "", "servings": 2, "avoid": [], "temperature": 0}
    request["ingredients"] = ["lentils", "lemon juice"]
    text = TEXT.replace("Season with", "Add lemon juice and season with")
    earlier = {
        "id": 1,
        "when": 1,
        "request": request,
        "recipes": [{"model": "soups", "text": text}],
    }
    page.evaluate(
        "kept => localStorage.setItem('toque.history', JSON.stringify([kept]))", earlier
    )
    page.reload()
    page.locator("#history").get_by_text(TITLE).click()
    finished(page)
    mark = "! lemon juice in the steps, not in the list"
    assert texts(page, ".requested li") == ["✓ lentils used", mark]
    assert (
        texts(page, ".shopping .food")[-1]
        == "lemon juice in the steps, not in the list"
    )
    look(page, "unlisted")


@pytest.mark.parametrize("size", SIZES)
def test_a_click_on_an_example_writes_it(opened, size):
    page = opened(size)
    example = page.locator("#ideas button").first
    dish = example.locator("strong").inner_text()
    page.evaluate("document.getElementById('temperature').value = 0")
    example.click()
    page.wait_for_selector(".sheet[aria-busy=false]")
    soon(page.locator("#go")).to_have_text("Write the recipe")
    assert texts(page, ".sheet h2") == [dish]
    assert page.input_value("#dish") == dish


def test_the_keyboard_alone_is_enough(opened):
    page = opened()
    for _ in range(3):  # the link over the masthead, the start, then the dish
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
        assert texts(page, "#problem")[0].startswith("The queue of this server is full")
        assert texts(page, "#problem")[0].endswith("Try again in 1 second.")
        finished(page)
        assert len(texts(page, ".sheet")) == 1
    page.click("#go")
    soon(page.locator("#problem")).to_contain_text("The server cannot be reached")


@pytest.fixture(scope="module")
def talks(serving) -> Iterator[str]:
    served = [
        replace(one, record=FOREIGN) for one in served_models(["one", "other"]).values()
    ]
    with serving(ServedModels(served)) as address:
        yield address


def test_a_task_of_ones_own_is_asked_by_its_prompt(opened, serving):
    tasks = [
        OwnTask("sentiment", "Review: {text}\nSentiment:", ("good", "bad")),
        OwnTask("answer", ("context", "question")),
    ]
    record = Provenance(form="pairs", max_new_tokens=8, own_tasks=tasks)
    first, other = served_models(["one", "other"]).values()
    models = [replace(first, record=record), replace(other, record=FOREIGN)]
    with serving(ServedModels(models)) as address:
        page = opened(to=address)
        offered = ["a question, unchanged", "sentiment", "answer"]
        soon(page.locator("#task option")).to_have_text(offered)
        page.select_option("#task", label="answer")
        assert page.input_value("#question") == "{context}\n\n{question}"
        page.select_option("#task", label="sentiment")
        page.keyboard.type("Cold.")  # over the field, which is selected
        assert page.input_value("#question") == "Review: Cold.\nSentiment:"
        look(page, "task")
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer[aria-busy=false] .by:not([hidden])")
        assert texts(page, ".question") == ["Review: Cold.\nSentiment:"]
        assert page.input_value("#question") == "Review: {text}\nSentiment:"
        page.evaluate("document.getElementById('more').open = true")
        page.select_option("#model", "other")
        assert page.locator("#task-field").is_hidden()


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_writes_no_recipes_is_talked_to(opened, talks, size):
    page = opened(to=talks, size=size)
    assert page.locator("#dish").count() == 0
    page.fill("#question", "Which rice?")
    page.evaluate("document.getElementById('more').open = true")
    page.fill("#temperature", "0")
    page.locator("#question").press("Enter")
    page.wait_for_selector(".answer[aria-busy=false] .by:not([hidden])")
    assert texts(page, ".question") == ["Which rice?"]
    [first] = texts(page, ".answer p:first-child")
    assert first
    page.select_option("#second", "other")
    page.fill("#question", "And how long?")
    page.click("#go")
    soon(page.locator(".answer[aria-busy=false] .by:not([hidden])")).to_have_count(3)
    # Both models have the same weights, and are told what the first had answered.
    assert len(set(texts(page, ".turns > li:last-child .answer p:first-child"))) == 1
    look(page, f"talk-{size}")
    page.reload()
    soon(page.locator(".question")).to_have_count(2)
    with page.expect_download() as saved:
        page.click("#save")
    line = json.loads(Path(saved.value.path()).read_text())
    assert [m["role"] for m in line["messages"]] == ["user", "assistant"] * 2
    assert line["messages"][1]["content"].strip() == first
    page.click("#undo")
    assert page.input_value("#question") == "And how long?"
    page.click("#fresh")
    assert texts(page, ".question") == []


@pytest.mark.parametrize("size", SIZES)
def test_a_conversation_begins_with_a_greeting_and_examples(opened, talks, size):
    page = opened(to=talks, size=size)
    soon(page.locator("#examples button")).to_have_count(3)
    assert page.locator("#greeting h2").is_visible()
    look(page, f"talk-{size}-empty")
    end = "document.querySelector('#request').getBoundingClientRect().bottom - innerHeight"
    assert abs(page.evaluate(end)) < 2
    example = page.locator("#examples button").first
    text = example.inner_text()
    example.click()
    page.wait_for_selector(".answer[aria-busy=false] .by:not([hidden])")
    assert texts(page, ".question") == [text]
    assert page.locator("#greeting").is_hidden()
    assert abs(page.evaluate(end)) < 2
    page.click("#fresh")
    assert page.locator("#greeting").is_visible()


def test_a_question_without_an_answer_is_neither_saved_nor_kept_nor_brought_back(
    opened, talks
):
    page = opened(to=talks)
    page.fill("#question", "Which rice?")
    page.click("#go")
    page.wait_for_selector(".answer[aria-busy=false] .by:not([hidden])")
    page.route("**/v1/chat/completions", lambda _: None)  # no answer comes
    page.fill("#question", "And how long?")
    page.click("#go")
    soon(page.locator(".question")).to_have_count(2)
    with page.expect_download() as saved:
        page.click("#save")
    line = json.loads(Path(saved.value.path()).read_text())
    assert [m["role"] for m in line["messages"]] == ["user", "assistant"]
    page.reload()
    soon(page.locator(".question")).to_have_text(["Which rice?"])
    page.wait_for_selector("#model option", state="attached")
    page.fill("#question", "And how long?")
    page.click("#go")
    soon(page.locator(".question")).to_have_count(2)
    page.click("#fresh")
    soon(page.locator("#go")).to_have_text("Ask")
    assert texts(page, ".question") == []
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert texts(page, ".question") == []

"""The live page in Chromium, beside a run that really trains and is really killed.

`fixtures/browser.py` says how to have accessibility checked, and pictures taken.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fixtures.browser import MARKS, SIZES, look, pages, soon
from toque.cooking.cookbook.recipes import write_cookbook
from watching.written_run import WrittenRun

pytestmark = MARKS
CONFIG = """
run_dir: runs/first
model: {family: gpt2, tokenizer: "trained:512",
  shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}
data: {sources: [{path: recipes.jsonl}], store: store, max_prompt_tokens: 64,
  max_target_tokens: 256}
optim: {warmup: "1 steps"}
train: {stop_after: "100000 steps", batch: "512 tokens", precision: float32, compile: false,
  evaluate_every: "40 steps", save_every: "20 steps"}
evaluation: {max_examples: 4, generate: 1, prompts: [lentil soup]}
observe: {log_every: "1 steps"}
"""


@pytest.fixture
def opened(browser):
    """A page as `pages` opens it, that asks nobody else; it fails the test on an error."""
    wrong = []

    def listen(page):
        page.on("request", lambda asked: asked.url.startswith("http://127.0.0.1:")
                or wrong.append(asked.url))  # fmt: skip

    with pages(browser, wrong) as open_page:
        yield partial(open_page, prepare=listen)
    assert wrong == []


@pytest.fixture
def training(tmp_path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A run that goes on for as long as it is let."""
    write_cookbook(tmp_path / "recipes.jsonl", n=120, seed=1)
    (tmp_path / "my.yaml").write_text(CONFIG)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toque", "train", "my.yaml"],
            cwd=tmp_path, stdout=log, stderr=log,
        )  # fmt: skip
        yield process, tmp_path / "runs"
        process.kill()
        process.wait()


def newest_loss(run: Path) -> float | None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return next((e["loss"] for e in reversed(events) if e["event"] == "step"), None)


def fact(page, name: str):
    return page.locator(".facts div", has_text=name).locator("dd")


def test_the_page_follows_a_run_and_says_that_it_was_killed(opened, training, showing):
    process, runs = training
    runs.mkdir()
    with showing(runs) as address:
        page = opened(address)
        soon(page.locator("#state")).to_contain_text("Running, at step")
        first = fact(page, "training loss").inner_text()
        soon(fact(page, "training loss")).not_to_have_text(first)
        lentils = page.locator("#texts details", has_text="lentil soup")
        lentils.locator("summary").click()
        soon(fact(page, "newest checkpoint")).to_contain_text("step")
        while process.poll() is None and page.title().split()[0] == first:
            time.sleep(0.1)

        os.kill(
            process.pid, signal.SIGSTOP
        )  # nothing new: what the page shows is the newest
        loss = newest_loss(runs / "first")
        soon(fact(page, "training loss")).to_have_text(f"{loss:.4f}")
        assert page.title().startswith(f"{loss:.4f} · step ")
        assert lentils.evaluate("it => it.open")

        process.kill()
        process.wait()
        soon(page.locator("#state")).to_contain_text(
            f"Killed: process {process.pid} has ended"
        )
        soon(page.locator("#status")).to_contain_text("Killed")
        soon(page.locator(".mark.killed")).to_have_text("killed")
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write('{"event": "step", "st')  # torn
        page.reload()
        soon(fact(page, "training loss")).to_have_text(f"{loss:.4f}")
        look(page, "killed")


@pytest.fixture
def two_runs(tmp_path):
    for name, rate in (("baseline", 0.7), ("more-dropout", 0.8)):
        run = WrittenRun(tmp_path / "runs" / name, stop_after="400 steps")
        for step in range(1, 301):
            run.step(step, loss=2 + 5 * rate ** (step / 20) + (step * 37 % 11) / 40)
            if step % 10 == 0:
                run.system(step)
            if step % 50 == 0:
                run.evaluation(
                    step, 2.2 + 5 * rate ** (step / 20), recipe_score=step / 400
                )
                run.text(step, "lentil soup", f"Ingredients:\n- {step} lentils\n")
        run.event(
            "warning", step=300, message="training waits for data 40 % of the time"
        )
        run.lock(os.getppid())
    return tmp_path / "runs"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_width_and_scheme(opened, two_runs, showing, size, scheme):
    with showing(two_runs) as address:
        page = opened(address, size, scheme)
        page.wait_for_selector("#machine svg", state="attached")
        look(page, f"{size}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_keyboard_chooses_runs_and_keeps_its_place(opened, two_runs, showing):
    with showing(two_runs) as address:
        page = opened(address)
        page.wait_for_selector("#loss svg", state="attached")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the content"
        button = page.locator("[data-show=more-dropout]")
        button.focus()
        page.keyboard.press("Enter")
        soon(page.locator("h1")).to_have_text("more-dropout")
        soon(button).to_have_attribute("aria-pressed", "true")
        assert button.evaluate("it => it === document.activeElement")
        box = page.locator("[data-over=baseline]")
        box.focus()
        page.keyboard.press("Space")
        soon(page.locator("#loss h2")).to_have_text("Loss")
        WrittenRun(two_runs / "baseline", begin=False).step(301, loss=1.0)
        soon(page.locator("#runs")).to_contain_text("1.0000")
        assert box.evaluate("it => it === document.activeElement && !it.checked")
        page.go_back()
        soon(page.locator("#loss h2")).to_have_text("Losses of all runs")


def test_a_server_that_ended_is_said(opened, two_runs, showing):
    with showing(two_runs) as address:
        page = opened(address)
        page.wait_for_selector("#loss svg", state="attached")
    soon(page.locator("#problem")).to_contain_text("The server cannot be reached")

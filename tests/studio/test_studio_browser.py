"""The studio in Chromium, from a file to a recipe, with a run that really trains.

`fixtures/browser.py` says how to have accessibility checked, and pictures taken.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.browser import MARKS, look, pages, soon
from tiny import shape_of
from toque.cooking.cookbook.recipes import write_cookbook
from toque.models.loading.from_scratch import build_model
from toque.models.loading.model_export import save_model

pytestmark = MARKS


class Server:
    """The command `toque studio` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = "0"

    def start(self) -> str:
        """Start the command, the second time at the same port. Return its address."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toque", "studio", "--no-browser", "--port", self.port],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "TOQUE_TOKEN": "sesame"},
        )  # fmt: skip
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        self.port = address.split(":")[2].partition("/")[0]
        return address

    def kill(self) -> None:
        """Kill the command, but not the runs that it started."""
        self.process.kill()
        self.process.communicate()  # also closes the pipe


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "kitchen"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.kill()
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder):
            process.kill()


MEASURE = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
window.notices = [];
window.Notification = class {
  static permission = "granted";
  constructor(title, { body }) { window.notices.push(`${title}: ${body}`); }
};
"""
"""Script that measures how far parts of the page move, and collects notifications."""


def bytes_received(page: Any) -> int:
    """Bytes of the page and everything that it has loaded."""
    entries = """["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind))"""
    return int(
        page.evaluate(f"{entries}.reduce((sum, each) => sum + each.transferSize, 0)")
    )


def choose_time(page: Any, time: str) -> None:
    page.check("[name=time][value='']")
    page.fill("#time", time)


def delete_and_undo(page: Any) -> None:
    """Delete the only run, and restore it."""
    page.click("text=Home")
    page.click(".card h3 a")
    page.click("text=Delete")
    soon(page.locator("#undo")).to_contain_text("is in the trash")
    soon(page.locator("#empty")).to_be_visible()
    page.click("text=Undo")
    soon(page.locator(".card")).to_have_count(1)


def share(page: Any) -> None:
    page.click("text=Share")
    page.select_option("#share-format", "hf")
    page.click("dialog .primary")
    soon(page.locator("dialog")).to_contain_text("Download as a zip file")
    look(page, "studio-shared")
    page.click("dialog >> text=Close")


def test_from_a_file_to_a_recipe_with_a_killed_server(browser, server, tmp_path):
    write_cookbook(tmp_path / "recipes.jsonl", n=300, seed=1)
    wrong: list[str] = []
    with pages(browser, wrong) as open_page:
        page = open_page(
            server.start(), prepare=lambda page: page.add_init_script(MEASURE)
        )
        soon(page.locator("#empty")).to_be_visible()
        assert 10_000 < bytes_received(page) < 100_000
        assert page.evaluate("window.shift") < 0.01
        look(page, "studio-empty")
        page.click("text=New run")
        page.set_input_files("#file", tmp_path / "recipes.jsonl")
        soon(page.locator(".source")).to_contain_text("300 recipes")
        choose_time(page, "1 minute")
        page.wait_for_timeout(600)
        soon(page.locator("#go")).to_be_enabled()
        look(page, "studio-new")
        page.click("#go")
        soon(page.locator("#controls")).to_contain_text("Stop")
        soon(page.locator("#head .mark")).to_have_text("running")

        server.kill()
        soon(page.locator("#problem")).to_contain_text("cannot be reached")
        server.start()
        soon(page.locator("#problem")).to_be_hidden()
        other = open_page(page.url.replace("/#", "/?token=sesame#"), "phone", "dark")
        soon(other.locator("#head h1")).to_have_text("runs/recipes")
        soon(page.locator("#head .mark")).to_have_text("ended")
        soon(page.locator("#controls")).to_contain_text("Train longer")
        [notice] = page.evaluate("window.notices")
        assert notice.startswith("Toque: recipes: ")
        look(page, "studio-ended")
        assert list(server.folder.glob("runs/*")) == [server.folder / "runs/recipes"]

        page.click("text=Cook with it")
        page.locator("#ideas button").first.click()
        page.wait_for_selector(".sheet[aria-busy=false]")
        page.wait_for_selector(".shopping li, .verdict:not([hidden])")
        look(page, "studio-recipe")

        page.go_back()
        share(page)
        page.click(".actions >> text=Compare")
        soon(page.locator("#model option")).to_have_count(2)
        page.fill("#prompt", "Lentil soup: lentils, carrots")
        page.click("#go")
        page.click("text=A is better")
        soon(page.locator("#wins")).to_contain_text(re.compile("1 : 0|0 : 1"))
        look(page, "studio-compared")

        delete_and_undo(page)
        look(page, "studio-home")
    assert wrong == []


def test_a_table_with_unknown_columns(browser, server):
    rows = "".join(f"Was ist {n}?,Eine Zahl {n}\n" for n in range(80))
    (server.folder / "zahlen.csv").write_text("frage,antwort\n" + rows)
    wrong: list[str] = []
    with pages(browser, wrong) as open_page:
        page = open_page(server.start(), "phone")
        page.click("text=New run")
        page.check("text=zahlen.csv")
        soon(page.locator("#recognised")).to_contain_text("Choose the columns")
        look(page, "studio-columns")
        page.select_option("#part-prompt", "frage")
        page.select_option("#part-target", "antwort")
        page.click("text=Use these columns")
        soon(page.locator(".source")).to_contain_text("80 prompts with answers")
        soon(page.locator("#go")).to_be_enabled()
        page.click("#advanced summary")
        page.fill("#yaml", "run_dir: runs/a\ntrain: {batch: many}\n")
        soon(page.locator("#yaml-problem")).to_contain_text("Line 2:")
        soon(page.locator("#go")).to_be_disabled()
        look(page, "studio-problem")

        broken = (
            "run_dir: runs/zahlen\ndata:\n  sources: [{path: gone.csv}]\n  store: s\n"
        )
        page.fill("#yaml", broken)
        soon(page.locator("#yaml-problem")).to_be_hidden()
        soon(page.locator("#go")).to_be_enabled()
        page.click("#go")
        soon(page.locator("#controls .problem:visible")).to_contain_text("gone.csv")
        look(page, "studio-failed")
        page.click("text=Change its settings")
        soon(page.locator("#yaml")).to_have_value(
            re.compile("^run_dir: runs/zahlen-2\n")
        )
        page.fill("#name", "Soups")
        page.press("#name", "Tab")
        soon(page.locator("#yaml")).to_have_value(re.compile("^run_dir: runs/soups\n"))
        look(page, "studio-edited")
    assert wrong == []


def test_conversations_with_a_base(browser, server, writers_of_json):
    codec = writers_of_json["decoder"]
    model = build_model(
        family="llama", shape=shape_of("llama", positions=256), vocab_size=codec.vocab_size,
        pad_id=codec.pad_id, eos_id=codec.eos_id, bos_id=codec.bos_id, seed=0,
    )  # fmt: skip
    save_model(model, None, server.folder / "base", card="", files=codec.files())
    with (server.folder / "talk.jsonl").open("w") as file:
        for n in range(150):
            turns = [
                ("user", f"How long do {n} eggs boil?"),
                ("assistant", f"{n} minutes."),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    wrong: list[str] = []
    with pages(browser, wrong) as open_page:
        page = open_page(server.start())
        page.click("text=New run")
        page.check("text=talk.jsonl")
        soon(page.locator(".source")).to_contain_text("150 conversations")
        page.select_option("#base", "base")
        choose_time(page, "1 minute")
        page.wait_for_timeout(600)
        soon(page.locator("#go")).to_be_enabled()
        look(page, "studio-conversations")
        page.click("#go")
        page.click("text=Talk to it")
        page.fill("#question", "How long do 3 eggs boil?")
        page.click("#go")
        soon(page.locator("#turns li")).to_have_count(1)
        soon(page.locator("#go")).to_have_text("Ask")
        look(page, "studio-talk")
    assert wrong == []


def test_a_file_that_is_dropped_on_the_start_view_is_uploaded(browser, server):
    wrong: list[str] = []
    with pages(browser, wrong) as open_page:
        page = open_page(server.start())
        soon(page.locator("#empty")).to_be_visible()
        transfer = page.evaluate_handle("""() => {
          const transfer = new DataTransfer();
          transfer.items.add(new File(["Boil the rice. ".repeat(900)], "rice.txt"));
          return transfer;
        }""")
        page.dispatch_event("#empty", "drop", {"dataTransfer": transfer})
        soon(page.locator(".source h3")).to_have_text("rice.txt")
        assert (server.folder / "rice.txt").stat().st_size == 13_500
    assert wrong == []

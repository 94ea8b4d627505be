"""The live page, asked for by a plain client."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from contextlib import closing
from urllib.parse import urlencode, urlsplit

import pytest

from toque.cli import main
from toque.errors import ConfigError
from toque.runs.places import RunFinder
from toque.serving.watch_app import Watcher
from toque.workflows.inference.serve import watch
from watching.written_run import WrittenRun

TAG = re.compile(r"<[^>]+>")


def got(
    address: str, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    with closing(
        http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    ) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


class Reader:
    """A page that asks again and again what is new."""

    def __init__(self, address: str, **asked: object) -> None:
        self._address, self._asked = address, asked
        self._since = ""
        self.parts: dict[str, str] = {}

    def next(self) -> dict[str, object]:
        """The next answer with something new, and of its parts those; `parts` gathers them."""
        for _ in range(600):
            query = urlencode(self._asked | {"since": self._since}, doseq=True)
            status, text, _ = got(self._address, f"/api/page?{query}")
            assert status == 200
            message = json.loads(text)
            assert message["pause_seconds"] >= 0.05
            self._since, parts = message["version"], message.get("parts", {})
            message["parts"] = {
                n: part for n, part in parts.items() if self.parts.get(n) != part
            }
            self.parts |= message["parts"]
            if message["parts"]:
                return message
            time.sleep(0.05)
        raise AssertionError("nothing new")

    def text(self, part: str) -> str:
        return " ".join(TAG.sub(" ", self.parts[part]).split())


@pytest.fixture
def runs(tmp_path):
    for name, loss in (("one", 2.0), ("two", 3.0)):
        run = WrittenRun(tmp_path / "runs" / name)
        for step in (1, 2):
            run.step(step, loss=loss / step)
        run.evaluation(2, loss)
    return tmp_path / "runs"


def test_new_figures_come_by_themselves_and_nothing_else_does(runs, showing):
    run = WrittenRun(runs / "one", begin=False)
    with showing(runs / "one") as address:
        reader = Reader(address)
        first = reader.next()
        assert set(first["parts"]) >= {"head", "loss", "course"}
        assert first["state"] == "one: Running, at step 2."
        assert first["title"] == "1.0000 · step 2 · one"
        assert "Learning rate" in reader.parts["course"]
        assert (
            "Utilisation" not in reader.parts["course"]
        )  # no event has a number of it
        run.step(3, loss=0.25)
        second = reader.next()
        assert (second["title"], second["state"]) == (
            "0.2500 · step 3 · one",
            "one: Running, at step 3.",
        )
        assert set(second["parts"]) == {"head", "loss", "course"}
        run.text(3, "soup", "Boil <b>water</b>.")
        assert set(reader.next()["parts"]) == {"texts"}
        assert "Boil &lt;b&gt;water" in reader.parts["texts"]
        run.end(3)
        assert reader.next()["state"] == "one: Finished, at step 3."


def test_several_runs_over_each_other_and_one_in_full(runs, showing):
    with showing(runs) as address:
        reader = Reader(address, show="two")
        reader.next()
        assert "one running 2 20% 1.0000 2.0000" in reader.text("runs")
        assert reader.parts["course"].count("<li>") >= 4  # a legend names both
        assert "two running Running" in reader.text("head")
        reader = Reader(address, show="one", over=["one"])
        reader.next()
        assert "training, smoothed" in reader.text("loss")
        reader = Reader(address, over=[""], show="nobody")
        reader.next()
        assert "checked" not in reader.parts["runs"]


def test_reward_and_loss_of_pairs_are_named_in_the_table(tmp_path, showing):
    WrittenRun(tmp_path / "one").step(1, loss=-0.1, reward=0.75)
    WrittenRun(tmp_path / "two").step(1, loss=0.5, **{"rewards/accuracies": 0.75})
    with showing(tmp_path) as address:
        reader = Reader(address, show="one")
        assert str(reader.next()["title"]).startswith("0.7500 · step 1")
        assert "one running 1 10% reward 0.7500 -" in reader.text("runs")
        assert "two running 1 10% loss of pairs 0.5000 -" in reader.text("runs")
        assert "Rewards and losses of all runs" in reader.text("loss")


def test_a_folder_is_waited_for_before_its_first_run(tmp_path):
    command = [sys.executable, "-m", "toque", "watch", "runs", "--port", "0"]
    watching = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    try:
        address, _, rest = watching.stdout.readline().partition(" ")
        assert rest == "shows runs.\n"
        reader = Reader(address)
        assert "runs does not contain a run yet" in str(reader.next()["state"])
        WrittenRun(tmp_path / "runs" / "new" / "deep").step(1)
        assert str(reader.next()["state"]).startswith("new/deep: Running")
    finally:
        watching.terminate()
        told = watching.communicate()[1]
    assert "runs does not exist yet" in told
    assert watching.returncode == 0


def test_hostile_names_and_texts_are_text(tmp_path, showing):
    run = WrittenRun(tmp_path / "<img src=x onerror=alert(1)>", begin=False)
    deep = '{"a":' * 400 + "1" + "}" * 400
    run.raw(
        f'{{"event": "start", "step": 0, "stop_after": "<script>", "deep": {deep}}}\n'
    )
    (run.folder / "config.yaml").write_text("data:\n  store: a\0<script>b\n")
    run.step(1)
    run.event("warning", step=1, message="<script>alert(1)</script>")
    run.evaluation(1, 1.0, **{"<svg onload=x>": 1.0})
    run.evaluation(2, 1.0, **{"<svg onload=x>": 2.0})
    run.event("gradients", step=1, groups={"<u>": {"grad_norm": 1.0}})
    WrittenRun(tmp_path / "other").step(1)
    with showing(tmp_path) as address:
        reader = Reader(address, show=run.folder.name)
        reader.next()
        everything = "".join(reader.parts.values())
        for tag in ("<script", "<img", "<svg onload", "<u>"):
            assert tag not in everything
        assert "&lt;script&gt;" in everything


def test_the_page_forbids_other_hosts_and_asks_none(runs, showing):
    with showing(runs) as address:
        _, page, headers = got(address, "/")
        assert "default-src 'none'" in headers["content-security-policy"]
        links = re.findall(r'(?:src|href)="([^"#]+)"', page)
        assert len(links) >= 4
        for link in links:
            status, text, _ = got(address, f"/{link}")
            assert status == 200
            assert "http" not in text.replace("http://www.w3.org", "")
        assert got(address, "/", Host="evil.example")[0] == 421


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nowhere", 404, "/nowhere does not exist on this server."),
        ("PUT", "/api/page", 405, "/api/page does not support PUT."),
    ],
)
def test_a_wrong_path_and_a_wrong_method_are_told_apart(
    method, path, status, message, runs, showing
):
    with showing(runs) as address:
        found, text, headers = got(address, path, method=method)
    assert (found, json.loads(text)["error"]["message"]) == (status, message)
    assert ("allow" in headers) == (status == 405)


def test_the_verdict_on_a_run_is_asked_for_seldom(runs):
    asked, now = [], [100.0]
    watcher = Watcher(
        RunFinder(runs / "one"), every=0, judge=asked.append, clock=lambda: now[0]
    )
    for seconds, times in ((0, 1), (10, 1), (1000, 2)):
        now[0] += seconds
        WrittenRun(runs / "one", begin=False).step(3)
        assert watcher.view()[0] is not None
        assert len(asked) == times


def test_what_cannot_be_watched_is_refused_in_words(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{}")
    for place, words in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "store", "is a store or a checkpoint"),
        ("https://example.org/runs", "addresses are not supported"),
    ):
        with pytest.raises(ConfigError, match=words):
            watch(place)
    with pytest.raises(ConfigError, match="can be reached by other machines"):
        watch(tmp_path, host="0.0.0.0")  # noqa: S104
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            main(["watch", str(tmp_path), "--port", str(port)]) == ConfigError.exit_code
        )
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in said
    assert "Choose another --port" in said
    assert len(said.strip().splitlines()) == 1

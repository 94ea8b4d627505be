"""The stream of the live page, asked by a plain client."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing
from urllib.parse import urlencode, urlsplit

import pytest

from toque.cli import main
from toque.errors import ConfigError
from toque.workflows.watch import watch
from watching.written_run import WrittenRun

TAG = re.compile(r"<[^>]+>")


def got(address: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


class Stream:
    """The messages of /api/stream."""

    def __init__(self, address: str, *, token: str = "", **asked: object) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connection.request(
            "GET", f"/api/stream?{urlencode(asked, doseq=True)}", headers=headers
        )
        self._answer = self._connection.getresponse()
        self.parts: dict[str, str] = {}

    def next(self) -> dict[str, object]:
        """The next message; `parts` gathers what the page shows."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                message = json.loads(line.removeprefix(b"data: "))
                self.parts |= message.get("parts", {})
                return message
        return {}

    def text(self, part: str) -> str:
        return " ".join(TAG.sub(" ", self.parts[part]).split())

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


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
    with showing(runs / "one") as address, closing(Stream(address)) as stream:
        first = stream.next()
        assert set(first["parts"]) >= {"head", "loss", "course"}
        assert (first["loss"], first["said"]) == (1.0, "one: Running, at step 2.")
        assert first["title"] == "1.0000 · step 2 · one"
        assert "Learning rate" in stream.parts["course"]
        assert "Utilisation" not in stream.parts["course"]  # no event has a number of it
        run.step(3, loss=0.25)
        second = stream.next()
        assert (second["loss"], second["said"]) == (0.25, "one: Running, at step 3.")
        assert set(second["parts"]) == {"head", "loss", "course"}
        run.text(3, "soup", "Boil <b>water</b>.")
        assert set(stream.next()["parts"]) == {"texts"}
        assert "Boil &lt;b&gt;water" in stream.parts["texts"]
        run.end(3)
        assert stream.next()["said"] == "one: Finished, at step 3."


def test_several_runs_over_each_other_and_one_in_full(runs, showing):
    with showing(runs) as address:
        with closing(Stream(address, show="two")) as stream:
            stream.next()
            assert "one running 2 20% 1.0000 2.0000" in stream.text("runs")
            assert stream.parts["course"].count("<li>") >= 4  # a legend names both
            assert "two running Running" in stream.text("head")
        with closing(Stream(address, show="one", over=["one"])) as stream:
            stream.next()
            assert "training, smoothed" in stream.text("loss")
        with closing(Stream(address, over=[""], show="nobody")) as stream:
            stream.next()
            assert "checked" not in stream.parts["runs"]


def test_runs_that_begin_later_appear(tmp_path, showing):
    (tmp_path / "runs").mkdir()
    with showing(tmp_path / "runs") as address, closing(Stream(address)) as stream:
        assert "No run is in" in str(stream.next()["said"])
        WrittenRun(tmp_path / "runs" / "new" / "deep").step(1)
        assert str(stream.next()["said"]).startswith("new/deep: Running")


def test_a_folder_is_waited_for_before_its_first_run(tmp_path):
    command = [sys.executable, "-m", "toque", "watch", "runs", "--port", "0"]
    watching = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    try:
        address, _, rest = watching.stdout.readline().partition(" ")
        assert rest == "shows runs.\n"
        with closing(Stream(address)) as stream:
            assert "No run is in runs yet" in str(stream.next()["said"])
            WrittenRun(tmp_path / "runs" / "first").step(1)
            assert str(stream.next()["said"]).startswith("first: Running")
    finally:
        watching.terminate()
        told = watching.communicate()[1]
    assert "runs is not there yet" in told
    assert watching.returncode == 0


def test_hostile_names_and_texts_are_text(tmp_path, showing):
    run = WrittenRun(tmp_path / "<img src=x onerror=alert(1)>")
    run.step(1)
    run.event("warning", step=1, message="<script>alert(1)</script>")
    run.evaluation(1, 1.0, **{"<svg onload=x>": 1.0})
    run.evaluation(2, 1.0, **{"<svg onload=x>": 2.0})
    run.event("gradients", step=1, groups={"<u>": {"grad_norm": 1.0}})
    WrittenRun(tmp_path / "other").step(1)
    with showing(tmp_path) as address, closing(Stream(address, show=run.folder.name)) as stream:
        stream.next()
        everything = "".join(stream.parts.values())
        for tag in ("<script", "<img", "<svg onload", "<u>"):
            assert tag not in everything
        assert "&lt;script&gt;" in everything


def test_a_token_is_asked_for_and_nothing_leaves_without_it(runs, showing):
    token = "sesame"  # noqa: S105
    with showing(runs, token=token) as address:
        assert got(address, "/api/stream")[0] == 401
        with closing(Stream(address, token=token)) as stream:
            assert "parts" in stream.next()


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


def test_a_reader_does_not_keep_the_server_from_ending(runs, showing):
    with showing(runs) as address:
        stream = Stream(address)
        stream.next()
        last: list[object] = []
        reading = threading.Thread(target=lambda: last.append(stream.next()))
        reading.start()
    reading.join(20)
    assert last == [{}]
    stream.close()


def test_what_cannot_be_watched_is_refused_in_words(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{}")
    for place, words in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "store", "is a store or a checkpoint"),
    ):
        with pytest.raises(ConfigError, match=words):
            watch(place)
    with pytest.raises(ConfigError, match="cannot hold a run"):
        watch("https://example.org/runs")
    with pytest.raises(ConfigError, match="can be reached by other machines"):
        watch(tmp_path, host="0.0.0.0")  # noqa: S104
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in said
    assert "Name another --port" in said
    assert len(said.strip().splitlines()) == 1

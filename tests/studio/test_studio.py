"""The studio as a whole: its state, removed runs, models and exports."""

import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import toque
from fixtures.kitchens import TINY
from toque.cooking.cookbook.recipes import write_cookbook
from toque.serving.gate import Limits
from toque.serving.request_errors import RequestError
from toque.studio import model_pool, routes
from toque.studio.application import build_studio
from toque.studio.jobs import Jobs
from toque.studio.workplace import Workplace
from watching.written_run import WrittenRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_cookbook(folder / "recipes.jsonl", n=60, seed=1)
    config = toque.configure(
        TINY,
        run_dir=str(folder / "runs/soup"),
        data={
            "sources": [{"path": str(folder / "recipes.jsonl")}],
            "store": str(folder / "store"),
        },
        train={"stop_after": "4 steps"},
    )
    toque.train(config)
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (trained / ".studio").mkdir(exist_ok=True)
    monkeypatch.chdir(trained)
    return trained


def home(client: Any) -> dict[str, Any]:
    return client.get("/api/home").json()


def test_the_start_shows_runs_and_the_machine(client, folder):
    WrittenRun(folder / "runs" / "written", stop_after="400 steps").step(3, loss=2.0)
    found = home(client)
    cards = {card["name"]: card for card in found["runs"]}
    soup = cards["runs/soup"]
    assert (soup["state"], soup["is_finished"], soup["form"]) == (
        "ended",
        True,
        "recipes",
    )
    assert soup["sources"] == ["recipes.jsonl"]
    assert soup["score"]["title"] == "held-out loss"
    assert soup["curve"].startswith('<svg class="spark"')
    assert cards["runs/written"]["done"] == pytest.approx(3 / 400)
    assert found["machine"]["cores"] >= 1
    models = [model["name"] for model in client.get("/api/models").json()["models"]]
    assert models == ["runs/soup"]


def test_a_model_is_opened_on_request_and_writes(client, folder):
    request = {
        "model": "runs/soup",
        "prompt": "Generate recipe for: soup",
        "max_tokens": 4,
    }
    answer = client.post("/v1/completions", json=request)
    assert answer.status_code == 404
    for _ in range(2):
        assert client.post("/api/open", json={"model": "runs/soup"}).status_code == 200
    assert client.post("/v1/completions", json=request).json()["choices"][0]["text"]
    prompt = client.post(
        "/api/prompt", json={"model": "runs/soup", "dish": "soup"}
    ).json()
    assert prompt["prompt"] == "Generate recipe for: soup"

    for name in ("one", "two"):  # more than are open at a time
        (folder / name).symlink_to(folder / "runs/soup/model")
        assert client.post("/api/open", json={"model": name}).status_code == 200
        (folder / name).unlink()
    assert client.post("/v1/completions", json=request).status_code == 404
    assert len(client.get("/v1/models").json()["data"]) == 2
    assert client.post("/api/open", json={"model": "runs/soup"}).status_code == 200
    assert client.post("/v1/completions", json=request).status_code == 200
    missing = client.post("/api/open", json={"model": "runs/cake"})
    assert missing.status_code == 404


def test_a_deleted_run_can_be_restored(client, folder):
    run = WrittenRun(folder / "runs" / "removed", stop_after="400 steps")
    run.step(3, loss=2.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    run.lock(ended.pid)
    before = sorted(path.name for path in (folder / "runs/removed").iterdir())
    time.sleep(1.1)  # the runs are read once a second
    assert "runs/removed" in {card["name"] for card in home(client)["runs"]}
    id_ = client.post("/api/delete", json={"run": "runs/removed"}).json()["id"]
    assert not (folder / "runs/removed").exists()
    body = {"id": id_, "run": "runs/removed"}
    assert home(client)["trash"] == [body]
    assert client.post("/api/restore", json=body).status_code == 200
    assert sorted(path.name for path in (folder / "runs/removed").iterdir()) == before
    assert client.post("/api/restore", json=body).status_code == 404
    assert home(client)["trash"] == []

    client.post("/api/delete", json={"run": "runs/removed"})
    (folder / "kept").mkdir()
    (folder / "kept" / "texts").write_text("texts")
    (folder / ".studio/trash/link").symlink_to(folder / "kept")
    for _ in range(2):
        assert client.post("/api/empty", json={}).status_code == 200
    assert home(client)["trash"] == []
    assert not (folder / "runs/removed").exists()
    assert (folder / "kept" / "texts").read_text() == "texts"


def test_a_run_without_time_for_training_is_marked(client, folder):
    run = WrittenRun(folder / "runs" / "short", begin=False)
    length = {"stop_after": "1 minutes total"}
    run.event("start", step=0, epoch=0.0, stop_after="3 seconds", train=length)
    run.step(3, loss=2.0)
    run.end(3)
    time.sleep(1.1)  # the runs are read once a second
    card = next(card for card in home(client)["runs"] if card["name"] == "runs/short")
    assert "were left for training" in card["remark"]


def test_only_runs_are_deleted_and_restored(client, folder):
    answer = client.post("/api/delete", json={"run": "runs"})
    assert answer.status_code == 404
    assert (folder / "runs").is_dir()
    body = {"id": "1", "run": str(folder)}
    assert client.post("/api/restore", json=body).status_code == 404


def test_a_huge_score_is_left_out(client, folder):
    run = WrittenRun(folder / "runs" / "huge", stop_after="400 steps")
    run.step(3, loss=2.0)
    scores = '{"generated": {"recipe_score": 1' + "0" * 400 + "}}"
    (folder / "runs/huge/evaluation.json").write_text(scores)
    time.sleep(1.1)
    assert "runs/huge" in {card["name"] for card in home(client)["runs"]}


def test_the_queue_continues_after_an_error(folder, monkeypatch):
    calls = []

    def advance(_: Jobs) -> None:
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Jobs, "advance", advance)
    monkeypatch.setattr(routes, "_ADVANCE_SECONDS", 0.01)
    app = build_studio(Workplace(folder), token="", hosts=None, limits=Limits())
    with TestClient(app):
        time.sleep(0.5)
    assert len(calls) > 1


def test_names_and_times_of_exports_are_free(client, folder):
    export = folder / "exports" / "борщ"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    os.utime(export / "config.json", (0, 0))
    answer = client.get("/api/export/exports/борщ.zip")
    assert zipfile.ZipFile(io.BytesIO(answer.content)).testzip() is None


def test_the_weights_of_all_files_of_a_model_count(tmp_path, monkeypatch):
    memory = SimpleNamespace(available=10_000)
    monkeypatch.setattr(model_pool.psutil, "virtual_memory", lambda: memory)
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"0" * 3000)
    with pytest.raises(RequestError, match="needs about"):
        model_pool._refuse_large("big", tmp_path)


def test_a_running_run_is_not_deleted(client, folder):
    run = WrittenRun(folder / "runs" / "busy", stop_after="400 steps")
    run.step(3, loss=2.0)
    run.lock(os.getppid())
    time.sleep(1.1)
    answer = client.post("/api/delete", json={"run": "runs/busy"})
    assert answer.status_code == 409
    assert (folder / "runs/busy").is_dir()


def test_a_run_of_another_version_is_shown_but_does_not_continue(client, folder):
    run = folder / "runs" / "future"
    written = WrittenRun(run, stop_after="400 steps")
    written.step(3, loss=2.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    written.lock(ended.pid)
    (run / "config.yaml").write_text("run_dir: runs/future\nflavour: {salt: 1}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tasted", "step": 4, "salt": []}\n')

    def card() -> dict[str, Any]:
        time.sleep(1.1)
        return next(
            each for each in home(client)["runs"] if each["name"] == "runs/future"
        )

    assert card()["score"] is None
    assert client.post("/api/continue", json={"run": "runs/future"}).status_code == 200
    while card()["state"] != "failed":
        pass
    assert "flavour" in card()["sentence"]


def test_an_export_is_compared_and_downloaded(client, folder):
    request = {"model": "runs/soup", "format": "hf"}
    answer = client.post("/api/export", json=request)
    assert answer.status_code == 200, answer.text
    name = answer.json()["name"]
    assert name == "exports/soup-hf"
    assert "read back and compared" in answer.json()["message"]
    data = client.get(f"/api/export/{name}.zip")
    disposition = data.headers["content-disposition"]
    assert disposition == "attachment; filename*=UTF-8''soup-hf.zip"
    archive = zipfile.ZipFile(io.BytesIO(data.content))
    assert archive.testzip() is None
    weights = archive.read("soup-hf/model.safetensors")
    assert weights == (folder / name / "model.safetensors").read_bytes()
    assert client.get("/api/export/runs/soup.zip").status_code == 404
    card = client.get(f"/api/card?model={name}").json()
    assert "soup" in card["card"]
    assert not card["has_adapter"]
    assert name in home(client)["models"]
    unfinished = folder / "exports" / "temp-soup-hf"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{}")
    assert "exports/temp-soup-hf" not in home(client)["models"]
    (folder / "--help").symlink_to(folder / "runs/soup")
    option = client.post("/api/export", json={"model": "--help", "format": "hf"})
    assert "read back and compared" in option.json()["message"]
    adapter = client.post("/api/export", json=request | {"format": "adapter"})
    assert adapter.status_code == 409
    assert "adapter" in adapter.json()["error"]["message"]


def start_studio(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the command. Return its process and address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "toque", "studio", "--port", "0", "--no-browser"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def refused(folder: Path) -> str:
    """The error of a studio that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "toque", "studio", "--port", "0"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    return done.stderr


def test_the_command_prints_an_address_that_opens_the_page(tmp_path):
    process, address = start_studio(tmp_path)
    try:
        with httpx.Client(follow_redirects=True) as browser:
            page = browser.get(address)
            assert page.status_code == 200
            assert 'data-views="home new compare runs use talk"' in page.text
            base = str(page.url)
            assert browser.get(f"{base}api/home").json()["runs"] == []
        assert httpx.get(f"{base}api/home").status_code == 401
        assert "Another studio already uses" in refused(tmp_path)
    finally:
        process.kill()
        process.wait()
    jobs = tmp_path / ".studio" / "jobs.json"
    jobs.write_text("{broken")
    assert "jobs.json is damaged" in refused(tmp_path)

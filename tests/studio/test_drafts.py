"""Drafts of a studio: recognised files, proposals, checks, and written configurations."""

import json
from pathlib import Path

import pytest

from toque.config import load_text
from toque.cooking.cookbook.recipes import write_cookbook
from toque.studio import drafts
from toque.studio.workplace import Workplace
from toque.workflows.plan import run_estimate

SECONDS = "2 minutes"


@pytest.fixture
def place(folder: Path) -> Workplace:
    write_cookbook(folder / "recipes.jsonl", n=60, seed=1)
    rows = [
        {"frage": f"Was ist {n}?", "antwort": f"Eine Zahl, {n}."} for n in range(40)
    ]
    (folder / "unknown.csv").write_text(
        "frage,antwort\n" + "".join(f'"{r["frage"]}","{r["antwort"]}"\n' for r in rows)
    )
    return Workplace(folder)


def test_recipes_are_recognised_with_examples_and_problems(place, client):
    with (place.folder / "recipes.jsonl").open("a") as file:
        file.write("no JSON\n")
    answer = client.post("/api/recognise", json={"files": ["recipes.jsonl"]}).json()
    [source] = answer["sources"]
    assert source["kind"] == "recipes"
    assert source["summary"].endswith("60 recipes")
    assert source["languages"] == ["English"]
    assert len(source["examples"]) == 3
    assert all(prompt and text for prompt, text in source["examples"])
    assert len(source["problems"]) == 1
    assert source["problems"][0].endswith("first in line 61")


@pytest.mark.usefixtures("place")
def test_unknown_columns_are_listed_and_can_be_chosen(client):
    answer = client.post("/api/recognise", json={"files": ["unknown.csv"]}).json()
    assert answer["fields"] == ["frage", "antwort"]
    assert "--" not in answer["problem"]
    columns = {"prompt": "frage", "target": "antwort"}
    request = {"files": ["unknown.csv"], "columns": columns}
    [source] = client.post("/api/recognise", json=request).json()["sources"]
    assert source["kind"] == "prompts with answers"
    assert source["examples"][0] == ["Was ist 0?", "Eine Zahl, 0."]
    wrong = request | {"columns": {"prompt": "frage", "target": "missing"}}
    assert "missing" in client.post("/api/recognise", json=wrong).json()["problem"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("photo.jpg", b"\xff\xd8\xff\xe0" + bytes(300)), ("empty.jsonl", b""),
     ("paper.pdf", b"%PDF-1.7\n" + bytes(range(256)) * 9)],
)  # fmt: skip
def test_files_of_another_kind_are_refused_in_a_sentence(client, folder, name, content):
    (folder / name).write_bytes(content)
    answer = client.post("/api/recognise", json={"files": [name]}).json()
    assert name in answer["problem"]
    assert "Traceback" not in answer["problem"]


@pytest.mark.usefixtures("place")
def test_a_proposal_is_a_valid_configuration_with_its_forecast(client):
    request = {"name": "recipes.jsonl", "files": ["recipes.jsonl"], "time": SECONDS}
    answer = client.post("/api/propose", json=request)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["name"] == "recipes"
    config = load_text(found["yaml"], "line").config
    assert (config.run_dir, config.data.store) == ("runs/recipes", "stores/recipes")
    assert ".studio" not in found["yaml"]
    assert found["forecast"].startswith("Forecast: held-out loss")
    assert found["fits"]
    assert 0 < found["memory_bytes"] < found["room_bytes"]
    assert 0 < found["disk_bytes"] < found["free_disk_bytes"]
    needs = client.post("/api/check", json={"yaml": found["yaml"]}).json()
    assert needs["disk_bytes"] == found["disk_bytes"]

    wrong = client.post("/api/propose", json=request | {"time": "5 epochs"})
    assert wrong.status_code == 422
    assert wrong.json()["error"]["message"].startswith("the time")
    rewards = client.post("/api/propose", json=request | {"learn": "rewards"})
    assert "Choose a model under Start from" in rewards.json()["error"]["message"]
    sentences = [found["forecast"], *found["remarks"], wrong.json()["error"]["message"]]
    for name in ("docs/", "train.stop_after", "model.start_from"):
        assert name not in " ".join(sentences)


@pytest.mark.usefixtures("place")
def test_preparation_is_part_of_a_short_time(client):
    request = {"name": "a", "files": ["recipes.jsonl"], "time": "1 minute"}
    remarks = client.post("/api/propose", json=request).json()["remarks"]
    assert any("seconds of the 1 minute" in remark for remark in remarks), remarks


def test_a_new_model_does_not_learn_from_pairs(client, folder):
    pair = {"prompt": "soup", "chosen": "Boil it for an hour.", "rejected": "No."}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 20)
    request = {"name": "a", "files": ["pairs.jsonl"], "time": "1 minute"}
    answer = client.post("/api/propose", json=request)
    assert answer.status_code == 422
    assert "Choose a model under Start from" in answer.json()["error"]["message"]


def test_a_run_without_a_model_is_not_a_base(client, place):
    (place.folder / "runs/soup/checkpoints").mkdir(parents=True)
    body = {"files": ["recipes.jsonl"], "name": "a", "time": "1 minute"}
    answer = client.post("/api/propose", json=body | {"base": "runs/soup"})
    assert answer.status_code == 422
    assert "has no finished model yet" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("place")
def test_what_would_fit_is_shown_before_the_start(client, monkeypatch):
    monkeypatch.setattr(run_estimate, "free_bytes", lambda _: 700 << 20)
    request = {"name": "recipes.jsonl", "files": ["recipes.jsonl"], "time": SECONDS}
    text = client.post("/api/propose", json=request).json()["yaml"]
    large = text.replace("2048 tokens", "262144 tokens").replace(
        "hidden_size: 64", "hidden_size: 1024"
    )
    needs = client.post("/api/check", json={"yaml": large}).json()
    assert not needs["fits"]
    assert needs["memory_bytes"] > needs["room_bytes"]
    assert isinstance(needs["changes"], list)


def test_files_are_read_again_only_after_a_change(client, place, monkeypatch):
    read: list[list[str]] = []
    survey = drafts.survey_files

    def read_files(files, columns):
        read.append(files)
        return survey(files, columns)

    monkeypatch.setattr(drafts, "survey_files", read_files)
    request = {"name": "recipes.jsonl", "files": ["recipes.jsonl"]}
    for time in (SECONDS, "4 minutes"):
        answer = client.post("/api/propose", json=request | {"time": time})
        assert answer.status_code == 200, answer.text
    assert len(read) == 1
    with (place.folder / "recipes.jsonl").open("a") as file:
        file.write("{}\n")
    client.post("/api/recognise", json={"files": ["recipes.jsonl"]})
    assert len(read) == 2


def test_settings_of_a_run_are_copied_for_a_new_one(client, place):
    run = place.folder / "runs" / "soup"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 3\nrun_dir: runs/soup   # of this run\n")
    found = client.get("/api/config?run=runs/soup").json()
    assert found["name"] == "soup-2"
    assert found["yaml"] == "seed: 3\nrun_dir: runs/soup-2   # of this run\n"
    assert client.get("/api/config?run=runs/cake").status_code == 404
    (run / "config.yaml").write_text("run_dir: runs/soup\noptim: {name: pty:spawn}\n")
    answer = client.get("/api/config?run=runs/soup")
    assert answer.status_code == 409
    assert "names pty:spawn" in answer.json()["error"]["message"]
    (run / "config.yaml").unlink()
    (run / "config.yaml").mkdir()
    answer = client.get("/api/config?run=runs/soup")
    assert answer.status_code == 409
    assert "cannot be read" in answer.json()["error"]["message"]


def test_a_run_is_started_once(client, folder):
    text = "run_dir: runs/soup\ndata: {sources: [{path: missing.jsonl}], store: s}\n"
    body = {"name": "soup", "yaml": text}
    answers = [client.post("/api/start", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 409]
    assert [path.name for path in folder.glob("*.yaml")] == ["soup.yaml"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("run_dir: a\ntrain: {batch: many}\n", 2, "train.batch"),
        ("run_dir: a\noptim:\n  peak_lr: 1\n  rate: 2\n", 4, "rate"),
        ("run_dir: [\n", None, ""),
        ("run_dir: a\n\tmodel: b\n", 2, "tab"),
    ],
)
def test_errors_have_their_line(client, text, line, words):
    found = client.post("/api/check", json={"yaml": text}).json()
    assert words in found["problem"]
    assert line is None or found["line"] == line
    assert not found["problem"].startswith("line:")


def test_a_configuration_is_written_once_and_inside(place):
    text = "run_dir: runs/soup\ndata: {sources: [{path: recipes.jsonl}], store: s}\n"
    assert drafts.write_config(place, "soup", text) == ("soup.yaml", "runs/soup")
    assert (place.folder / "soup.yaml").read_text() == text
    (place.folder / "runs/soup").mkdir(parents=True)
    for run_dir, words in (
        ("runs/soup", "already exists"),
        ("../outside", "inside the studio"),
        (".", "inside the studio"),
        ("/outside", "inside the studio"),
    ):
        with pytest.raises(drafts.RequestError, match=words):
            drafts.write_config(place, "soup", text.replace("runs/soup", run_dir))
    with pytest.raises(drafts.RequestError, match="many"):
        drafts.write_config(place, "soup", "train: {batch: many}\n")
    assert drafts.config_of_run(place, "runs/soup") == "soup.yaml"


def test_a_run_without_its_file_is_continued_from_its_own_configuration(place):
    run = place.folder / "runs/other"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run_dir: runs/other\n")
    assert drafts.config_of_run(place, "runs/other") == "runs/other/config.yaml"
    (run / "config.yaml").write_text("run_dir: /outside\n")
    with pytest.raises(drafts.RequestError, match="names another folder"):
        drafts.config_of_run(place, "runs/other")
    (run / "config.yaml").write_text("run_dir: runs/other\ndata: {store: ../s}\n")
    with pytest.raises(drafts.RequestError, match="a store outside"):
        drafts.config_of_run(place, "runs/other")


def test_choices_become_pairs_that_dpo_reads(client, folder):
    sides = {
        "left": {"model": "a", "text": "Soup."},
        "right": {"model": "b", "text": "Cake."},
    }
    for number in range(6):
        body = {"prompt": f"Cook {number}", "choice": "left", **sides}
        assert client.post("/api/feedback", json=body).status_code == 200
    client.post("/api/feedback", json={"prompt": "Bake", "choice": "right", **sides})
    client.post("/api/feedback", json={"prompt": "Fry", "choice": "both_bad", **sides})
    [counts] = client.get("/api/wins").json()["wins"]
    assert (counts["models"], counts["wins"], counts["both_bad"]) == (
        ["a", "b"],
        [6, 1],
        1,
    )
    with (folder / "feedback-both-bad.jsonl").open("a") as file:
        file.write('{"models": 5}\n[\n{"models": ["a"]}\n')
    assert client.get("/api/wins").json()["wins"] == [counts]
    low, high = counts["interval"]
    assert low < 6 / 7 < high
    rows = list(map(json.loads, (folder / "feedback.jsonl").read_text().splitlines()))
    assert (rows[0]["chosen"], rows[-1]["chosen"]) == ("Soup.", "Cake.")
    [source] = client.post("/api/recognise", json={"files": ["feedback.jsonl"]}).json()[
        "sources"
    ]
    assert (source["kind"], source["records"]) == ("preference pairs", 7)


@pytest.mark.parametrize(
    "texts", [("Soup.", "Soup."), ("Soup.", " Soup. "), ("", "Soup.")]
)
def test_equal_or_blank_texts_are_no_choice(client, folder, texts):
    sides = {
        side: {"model": side, "text": text}
        for side, text in zip(("left", "right"), texts, strict=True)
    }
    body = {"prompt": "Cook", "choice": "left", **sides}
    assert client.post("/api/feedback", json=body).status_code == 422
    assert not (folder / "feedback.jsonl").exists()

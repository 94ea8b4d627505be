"""Paths of a studio: requests reach nothing outside of its folder."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from studio.conftest import TOKEN
from toque.errors import ConfigError
from toque.serving.gate import Limits
from toque.serving.request_errors import RequestError
from toque.studio import uploads, workplace
from toque.studio.application import build_studio
from toque.studio.server import run_studio
from toque.studio.uploads import Uploads
from toque.studio.workplace import Workplace, file_name

OUTSIDE = (
    "../secret.txt", "..", "a/../../secret.txt", "/etc/passwd", "//etc/passwd", ".studio/jobs.json",
    ".hidden", "runs/.hidden", "a\\..\\..\\secret.txt", "a\0b", "", ".", "./a", "out", "out/inner",
    "circle",
)  # fmt: skip
ENCODED = (
    "..%2Fsecret.txt", "%2e%2e%2fsecret.txt", "%2e%2e/secret.txt", "..%252Fsecret.txt",
    "..%c0%afsecret.txt", "..%5Csecret.txt", "%2e%2e%5csecret.txt", "..;/secret.txt",
    "....//secret.txt", "..%00/secret.txt", "%uff0e%uff0e/secret.txt",
)  # fmt: skip


@pytest.fixture
def place(folder: Path) -> Workplace:
    (folder.parent / "secret.txt").write_text("the secret")
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "inner").write_text("the secret")
    (folder / "out").symlink_to(folder.parent / "elsewhere")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "runs").mkdir()
    (folder / "runs" / ".hidden").write_text("the secret")
    (folder / ".hidden").write_text("the secret")
    (folder / "a").mkdir()
    return Workplace(folder)


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_outside_are_refused(place, name):
    with pytest.raises(RequestError, match="is not a file or folder of this studio"):
        place.path(name)


def test_paths_inside_are_found(place, folder):
    (folder / "inside").symlink_to(folder / "a")
    assert place.path("inside") == folder.resolve() / "inside"
    assert place.name_of(place.path("a")) == "a"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "a picture"),
        (b"%PDF-1.7\n" + bytes(99), "a PDF document"),
    ],
)
def test_files_without_texts_are_not_stored(client, folder, content, kind):
    before = sorted(folder.rglob("*"))
    answer = client.put("/api/files/soup.jsonl", content=content)
    assert answer.status_code == 415
    assert f"soup.jsonl is {kind}" in answer.json()["error"]["message"]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ENCODED)
def test_encoded_paths_are_refused(client, place, name):
    answers = [
        client.get(f"/api/card?model={name}"),
        client.get(f"/api/log?run={name}"),
        client.get(f"/api/export/{name}"),
        client.post("/api/recognise", json={"files": [name]}),
        client.post("/api/open", json={"model": name}),
        client.post("/api/delete", json={"run": name}),
        client.post("/api/continue", json={"run": name}),
        client.post("/api/restore", json={"id": name, "run": name}),
    ]
    for answer in answers:
        assert answer.status_code in (200, 404)
        assert "the secret" not in answer.text
        if answer.status_code == 200:
            assert answer.json() == {"log": ""}
    before = set(place.folder.parent.iterdir())
    client.put(f"/api/files/{name}", content=b"{}")
    assert set(place.folder.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("soups.jsonl", "soups.jsonl"),
        ("Äpfel & Birnen.csv", "Äpfel - Birnen.csv"),
        ("..", "file"),
        (".bashrc", "bashrc"),
        ("あ" * 90 + ".csv", "あ" * 65 + ".csv"),
        ("C:\\texts\\a b.txt", "a b.txt"),
        ("<script>.json", "-script-.json"),
    ],
)
def test_new_files_get_safe_names(place, sent, stored):
    assert place.new_file(file_name(sent)).name == stored


def test_files_are_uploaded_and_never_replaced(client, folder):
    texts = (b'{"text": "soup"}\n' * 9, b'{"text": "cake"}\n' * 9)
    # The first file is sent again after the second one, and is not stored again.
    for text, expected in ((texts[0], "soups.jsonl"), (texts[1], "soups-2.jsonl")):
        for content in (text, texts[0]):
            answer = client.put("/api/files/soups.jsonl", content=content)
            name = expected if content is text else "soups.jsonl"
            assert (answer.status_code, answer.json()["name"]) == (200, name)
        assert (folder / expected).read_bytes() == text
    files = client.get("/api/files").json()["files"]
    assert [file["bytes"] for file in files] == [153, 153]
    assert list((folder / ".studio" / "uploads").iterdir()) == []


def test_a_broken_link_is_not_replaced(client, folder):
    (folder / "soups.jsonl").symlink_to("missing")
    (folder / "soups.yaml").symlink_to("missing")
    assert client.put("/api/files/soups.jsonl", content=b"{}").json() == {
        "is_new": True,
        "name": "soups-2.jsonl",
    }
    assert Workplace(folder).new_run("soups") == "soups-2"


def test_links_in_the_folder_of_the_studio_are_refused(folder):
    documents = folder.parent / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("mine")
    (folder / ".studio" / "uploads").symlink_to(documents)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        run_studio(folder, browser=False)
    Uploads(Workplace(folder))
    assert (documents / "thesis.txt").exists()


def test_uploads_at_a_time_leave_space_on_the_disk(client, folder, monkeypatch):
    free = iter([400 << 20, 100 << 20])
    monkeypatch.setattr(
        workplace.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free))
    )
    answer = client.put("/api/files/a.txt", content=b"soup")
    assert answer.status_code == 507
    assert list((folder / ".studio" / "uploads").iterdir()) == []


def test_of_many_uploads_at_a_time_some_are_refused_and_none_is_damaged(folder):
    app = build_studio(Workplace(folder), token=TOKEN, hosts=None, limits=Limits())
    content = b"soup" * 300_000

    async def upload_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as client:
            uploads = (
                client.put(f"/api/files/{n}.txt", content=content) for n in range(100)
            )
            return await asyncio.gather(*uploads)

    answers = asyncio.run(upload_all())
    stored = [answer.json()["name"] for answer in answers if answer.is_success]
    refused = [answer for answer in answers if not answer.is_success]
    assert len(stored) >= 4
    assert refused
    assert all("uploads are running" in answer.text for answer in refused)
    files = {path.name: path.read_bytes() for path in folder.glob("*.txt")}
    assert files == dict.fromkeys(stored, content)


@pytest.mark.parametrize(
    "name", ["evil.py", "numpy.SO", "run.sh", "x.pth", "evil.py. "]
)
def test_programs_are_not_accepted(client, folder, name):
    answer = client.put(f"/api/files/{name}", content=b"import os")
    assert answer.status_code == 415
    assert "is a program" in answer.json()["error"]["message"]
    assert [path.name for path in folder.iterdir()] == [".studio"]


def test_a_full_disk_is_reported_before_the_upload(client, monkeypatch):
    monkeypatch.setattr(
        workplace.shutil, "disk_usage", lambda _: SimpleNamespace(free=300 << 20)
    )
    answer = client.put(
        "/api/files/big.txt", content=b"", headers={"Content-Length": str(2 << 30)}
    )
    assert answer.status_code == 507
    assert "2.1 GB" in answer.json()["error"]["message"]
    monkeypatch.setattr(uploads, "_RESERVE_BYTES", 0)
    answer = client.put("/api/files/small.txt", content=b"soup")
    assert answer.status_code == 200


def test_an_upload_that_ends_early_leaves_nothing(client, folder):
    headers = {"Content-Length": "100"}
    answer = client.put("/api/files/a.txt", content=b"soup", headers=headers)
    assert answer.status_code == 400
    assert "ended after 4 bytes of 100 bytes" in answer.json()["error"]["message"]
    parts = iter([b"so", b"up"])
    answer = client.put("/api/files/a.txt", content=parts)  # of unknown length
    assert answer.status_code == 411
    assert [path.name for path in folder.iterdir()] == [".studio"]
    assert list((folder / ".studio" / "uploads").iterdir()) == []


def test_a_disk_that_fills_during_an_upload_is_reported(client, monkeypatch):
    def write(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(uploads.os, "fsync", write)
    answer = client.put("/api/files/a.txt", content=b"soup")
    assert answer.status_code == 507
    assert "No space left on device" in answer.json()["error"]["message"]

"""Archives as sources: members like the files of a folder, and refusals."""

import gzip
import io
import json
import os
import stat
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from toque.config import RunConfig
from toque.errors import DataError
from toque.sources.archives import UNUSED_DAYS, is_archive
from toque.workflows.configure import configure
from toque.workflows.prepared_store import open_sources

SOUP = {
    "title": "Lentil Soup",
    "ingredients": ["1 cup lentils", "2 carrots"],
    "steps": ["Boil the lentils with the carrots for 20 minutes."],
}


def recipes(n: int, name: str = "Soup") -> bytes:
    lines = [json.dumps(SOUP | {"title": f"{name} {i}"}) for i in range(n)]
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "archives"


def write_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def config_of(path: Path) -> RunConfig:
    return configure(data={"sources": [{"path": str(path)}]})


def opened(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the contents of the files of a source by name, and the notices."""
    notices: list[str] = []
    (source,) = open_sources(config_of(path), say=notices.append)
    files = source.files or ()
    shown = {
        file.name.removeprefix(f"{path}/"): file.path.read_bytes() for file in files
    }
    return shown, notices


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_members_are_read_like_the_files_of_a_folder(tmp_path, write):
    members = {
        "export/soups.jsonl": recipes(9),
        "export/cakes.jsonl.gz": gzip.compress(recipes(9, "Cake")),
        "export/README.md": b"Recipes of my family, which I typed for years.",
        "export/photo.JPG": b"\xff\xd8\xff" + bytes(99),
        "export/.hidden.jsonl": recipes(9),
        "__MACOSX/soups.jsonl": bytes(99),
        "export/empty.jsonl": b"",
    }
    members = {f"./{name}": data for name, data in members.items()}
    found, notices = opened(write(tmp_path / "mine.dump", members))
    names = ["export/soups.jsonl", "export/cakes.jsonl.gz"]
    assert found == {name: members[f"./{name}"] for name in names}
    assert any("1 pictures" in notice for notice in notices), notices
    assert any("README.md" in notice for notice in notices), notices


def test_an_archive_is_unpacked_once_and_again_after_a_change(tmp_path, cache):
    path = write_zip(tmp_path / "mine.zip", {"soups.jsonl": recipes(3)})
    opened(path)
    (folder,) = [entry for entry in cache.iterdir() if entry.is_dir()]
    member = next(folder.rglob("soups.jsonl"))
    before = member.stat().st_ino
    opened(path)
    assert member.stat().st_ino == before
    member.unlink()  # the user may delete files of the cache
    assert opened(path)[0] == {"soups.jsonl": recipes(3)}

    write_zip(path, {"soups.jsonl": recipes(4)})
    os.utime(path, ns=(1, 1))
    assert opened(path)[0] == {"soups.jsonl": recipes(4)}


def test_an_archive_for_each_recipe_is_unpacked_but_no_deeper_one(tmp_path):
    def packed(members: Mapping[str, bytes]) -> bytes:
        return write_zip(tmp_path / "part", members).read_bytes()

    deep = packed({"c.zip": packed({"recipe.json": recipes(1)})})
    members = {
        "Soup.zip": packed({"recipe.json": recipes(1), "image.jpg": bytes(9)}),
        "Cake.zip": packed({"recipe.json": recipes(1, "Cake")}),
        "deep.zip": deep,
    }
    found, notices = opened(write_zip(tmp_path / "export.zip", members))
    assert sorted(found) == ["Cake.zip/recipe.json", "Soup.zip/recipe.json"]
    assert any("c.zip (a ZIP archive)" in notice for notice in notices), notices


def test_equal_and_strange_names_stay_apart(tmp_path):
    path = tmp_path / "mine.tar"
    with tarfile.open(path, "w", encoding="latin-1") as archive:
        for name in (
            "a.jsonl",
            "a.jsonl",
            "Crème\n\x1b[2J.jsonl",
            f"{'n' * 300}.jsonl",
        ):
            info = tarfile.TarInfo(name)
            data = recipes(2)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found, _ = opened(path)
    assert len(found) == 4
    assert all(name.isprintable() for name in found)
    assert {"a.jsonl", "a.jsonl (2)"} <= found.keys()


def linked_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("soups.jsonl")
        info.type = tarfile.SYMTYPE
        info.linkname = "/etc/passwd"
        archive.addfile(info)


def linked_zip(path: Path) -> None:
    info = zipfile.ZipInfo("soups.jsonl")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")


def encrypted_zip(path: Path) -> None:
    data = bytearray(write_zip(path, {"soups.jsonl": recipes(2)}).read_bytes())
    data[6] |= 1  # flags of the member, and of its entry in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


def damaged_zip(path: Path) -> None:
    data = write_zip(path, {"soups.jsonl": recipes(900)}).read_bytes()
    path.write_bytes(data[:60] + bytes(200) + data[260:])


def cut_tar(path: Path) -> None:
    data = write_tar(path, {"soups.jsonl": recipes(900)}, "w").read_bytes()
    path.write_bytes(data[: len(data) // 2])


def damaged_header(path: Path) -> None:
    members = {f"{n}.jsonl": recipes(2) for n in range(4)}
    data = bytearray(write_tar(path, members, "w").read_bytes())
    data[data.index(b"1.jsonl")] ^= 1
    path.write_bytes(data)


def cut_between_members(path: Path) -> None:
    members = {f"{n}.jsonl": recipes(2) for n in range(4)}
    data = write_tar(path, members, "w").read_bytes()
    path.write_bytes(data[: data.index(b"2.jsonl")])


def long_name(path: Path) -> None:
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a" * (2 << 20)))


def bomb(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("zeros.jsonl")
        info.size = 300 << 20
        archive.addfile(info, zeros(info.size))


def hidden_bomb(path: Path) -> None:
    """The declared size of the member is smaller than its content."""
    data = bytearray(write_zip(path, {"a.jsonl": bytes(9 << 20)}).read_bytes())
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)


def zeros(n_bytes: int) -> io.BufferedIOBase:
    class Zeros(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            view = memoryview(buffer)  # type: ignore[arg-type]
            view[:] = bytes(len(view))
            return len(view)

    return io.BufferedReader(Zeros(), min(n_bytes, 1 << 20))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: write_zip(path, {"../soups.jsonl": recipes(2)}), "leads out"),
        (lambda path: write_zip(path, {"a/..\\..\\b.jsonl": recipes(2)}), "leads out"),
        (lambda path: write_tar(path, {"/etc/soups.jsonl": recipes(2)}), "leads out"),
        (linked_tar, "a link or a device"),
        (linked_zip, "a link or a device"),
        (encrypted_zip, "encrypted with a password"),
        (damaged_zip, "damaged archive"),
        (cut_tar, "damaged archive"),
        (damaged_header, "damaged archive"),
        (cut_between_members, "damaged archive"),
        (long_name, "damaged archive"),
        (lambda path: write_zip(path, {"C:/soups.jsonl": recipes(2)}), "leads out"),
        (bomb, "decompression bomb"),
        (hidden_bomb, "damaged archive"),
        (lambda path: write_zip(path, {"photo.jpg": bytes(99)}), "no file that can be"),
    ],
)
def test_dangerous_and_damaged_archives_are_refused(tmp_path, cache, write, words):
    path = tmp_path / "mine.archive"
    write(path)
    assert is_archive(path)
    with pytest.raises(DataError, match=words) as caught:
        opened(path)
    assert "mine.archive" in str(caught.value)
    assert str(cache) not in str(caught.value)
    left = [entry for entry in cache.rglob("*") if entry.name == "soups.jsonl"]
    assert left == []


def test_many_archives_of_zeros_in_an_archive_are_refused(tmp_path):
    inner = write_zip(tmp_path / "inner", {"a.jsonl": bytes(64 << 20)}).read_bytes()
    path = write_zip(tmp_path / "42.zip", {f"{i}.zip": inner for i in range(16)})
    with pytest.raises(DataError, match="decompression bomb"):
        opened(path)


def test_a_prepared_list_of_the_cache_reads_nothing_else(tmp_path, cache):
    path = write_zip(tmp_path / "mine.zip", {"soups.jsonl": recipes(3)})
    opened(path)
    (contents,) = cache.rglob("contents.json")
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(recipes(9))
    (contents.parent / "000001" / "soups.jsonl").unlink()
    (contents.parent / "000001" / "soups.jsonl").symlink_to(secret)
    for file in (str(secret), f"../../../{secret.name}", "000001/soups.jsonl"):
        member = {"file": file, "name": "soups.jsonl", "bytes": len(recipes(9))}
        contents.write_text(json.dumps({"members": [member], "n_pictures": 0}))
        assert opened(path)[0] == {"soups.jsonl": recipes(3)}


def test_a_full_disk_is_reported_before_a_member_is_written(tmp_path, monkeypatch):
    path = write_zip(tmp_path / "mine.zip", {"soups.jsonl": recipes(3)})
    usage = type("Usage", (), {"free": 9})
    monkeypatch.setattr("toque.sources.archives.shutil.disk_usage", lambda _: usage)
    with pytest.raises(DataError, match="Free some space, or set TOQUE_CACHE"):
        opened(path)


def test_documents_and_arrays_are_no_archives(tmp_path):
    write_zip(tmp_path / "a.docx", {"word/document.xml": b"<w/>"})
    write_zip(tmp_path / "ids.npz", {"ids.npy": bytes(99)})
    write_zip(tmp_path / "weights.pt", {"model/data.pkl": b"\x80\x02."})
    (tmp_path / "soups.jsonl").write_bytes(recipes(2))
    assert not any(is_archive(path) for path in tmp_path.iterdir() if path.is_file())


def test_archives_that_were_not_used_for_a_month_are_removed(tmp_path, cache):
    names = ("old", "used", "new")
    paths = {
        name: write_zip(tmp_path / f"{name}.zip", {f"{name}.jsonl": recipes(2)})
        for name in names
    }
    for name in ("old", "used"):
        opened(paths[name])
    month_ago = time.time() - (UNUSED_DAYS + 1) * 86_400
    for contents in cache.rglob("contents.json"):
        os.utime(contents, (month_ago, month_ago))
    (cache / "temp-killed").mkdir()
    (cache / "notes").mkdir()
    assert opened(paths["used"])[1] == []  # nothing is unpacked, so nothing is removed
    assert len(list(cache.rglob("*.jsonl"))) == 2

    _, notices = opened(paths["new"])
    left = sorted(path.name for path in cache.rglob("*.jsonl"))
    assert left == ["new.jsonl", "used.jsonl"]
    assert any("Removed 1 unpacked" in notice for notice in notices), notices
    assert not (cache / "temp-killed").exists()
    assert (cache / "notes").exists()
    assert opened(paths["old"])[0] == {"old.jsonl": recipes(2)}

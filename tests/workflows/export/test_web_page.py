"""The folder of a web page: its files, what it knows of the model, and what is refused."""

import hashlib
import json
import re
import tarfile
from pathlib import Path

import pytest

import toque
from plain_transformers import model_folder
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError, DataError
from toque.workflows import browser_packages
from toque.workflows.browser_packages import package_files


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder node_modules with other contents, which are made the expected ones."""
    folder = tmp_path / "node_modules"
    expected = []
    for package in browser_packages._PACKAGES:
        hashes = {}
        for path in package.files:
            file = folder / package.name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(path)
            hashes[path] = hashlib.sha256(path.encode()).hexdigest()
        expected.append(package._replace(files=hashes))
    monkeypatch.setattr(browser_packages, "_PACKAGES", tuple(expected))
    return folder


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_page_has_the_model_its_tokens_and_its_prompt(
    family: str, packages: Path, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    kind = "encoder-decoder" if family == "t5" else "decoder"
    codec = load_codec(tokenizers_at[kind])
    model = model_folder(tmp_path, family, codec, wide=0.2)
    done = toque.export(model, tmp_path / "soup", form="web", packages=packages)
    assert "http.server -d " in str(done)
    settings = json.loads((done.folder / "settings.json").read_text())
    assert settings["recipes"]["asks"] == "Generate recipe for:"
    assert settings["max_new_tokens"] == 40
    assert settings["ends"] == [codec.eos_id]
    assert (settings["start"] is None) == (family == "gpt2")
    for name, size in settings["bytes"].items():
        assert (done.folder / name).stat().st_size == size
    assert settings["samples"][0]["prompt"].startswith("Generate recipe for: ")
    assert len(settings["samples"][0]["ids"]) > 20

    card = (done.folder / "README.md").read_text()
    assert "The matrices in the files have the type f16. Scores in this card" in card

    service = (done.folder / "service.js").read_text()
    listed = json.loads(re.search(r"const FILES = (\[.*\]);", service)[1])
    files = {p.relative_to(done.folder).as_posix() for p in done.folder.rglob("*")}
    assert {*listed} == {"./", *files} - {"onnx", "service.js"}
    page = (done.folder / "index.html").read_text()
    assert "<title>soup</title>" in page
    assert not re.findall(r"\{\{|\{%|https?://", page)


def test_a_page_of_conversations_is_refused(
    packages: Path, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    codec = load_codec(tokenizers_at["decoder"])
    model = model_folder(tmp_path, "gpt2", codec, "conversations", wide=0.2)
    with pytest.raises(ConfigError, match="has no conversations"):
        toque.export(model, tmp_path / "soup", form="web", packages=packages)
    assert not (tmp_path / "soup").exists()


def test_other_versions_of_the_packages_are_refused(packages: Path) -> None:
    (packages / "@huggingface/tokenizers/dist/tokenizers.min.mjs").write_text("evil()")
    with pytest.raises(
        ConfigError, match=r"npm install onnxruntime-web@1\.30\.0 @hugg"
    ):
        package_files(packages)


def test_a_changed_download_is_refused_and_a_right_one_is_stored(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    archives = {}
    for package in browser_packages._PACKAGES:
        archive = tmp_path / f"{package.name.split('/')[-1]}.tgz"
        _pack(archive, packages / package.name)
        archives[package.name] = archive.as_uri()
    monkeypatch.setattr(
        browser_packages._Package, "address", property(lambda p: archives[p.name])
    )
    assert package_files(None) == package_files(packages)
    archives.clear()  # the second time, nothing is downloaded
    assert package_files(None) == package_files(packages)

    expected = browser_packages._PACKAGES[0]
    changed = expected._replace(files=dict.fromkeys(expected.files, "0" * 64))
    monkeypatch.setattr(browser_packages, "_PACKAGES", (changed,))
    archives[expected.name] = (tmp_path / "onnxruntime-web.tgz").as_uri()
    with pytest.raises(DataError, match="SHA-256 differs"):
        package_files(None)
    archives[expected.name] = (tmp_path / "missing.tgz").as_uri()
    with pytest.raises(DataError, match="cannot be downloaded"):
        package_files(None)


def _pack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, "w:gz") as members:
        members.add(folder, "package")

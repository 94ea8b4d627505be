"""Files of JavaScript packages for the web page of a model: pinned versions, verified by hash."""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final, NamedTuple

from toque.errors import ConfigError, DataError, argument
from toque.storage.atomic import atomic_write, disk_faults
from toque.storage.download import CACHE_VARIABLE, cache_folder

_TIMEOUT: Final = 60  # seconds without an answer


class _Package(NamedTuple):
    """A package of the npm registry."""

    name: str
    version: str
    origin: str
    """Owner, licence and home."""
    files: dict[str, str]
    """SHA-256 by path in the package."""

    @property
    def address(self) -> str:
        """Address of its archive."""
        archive = f"{self.name.split('/')[-1]}-{self.version}.tgz"
        return f"https://registry.npmjs.org/{self.name}/-/{archive}"


_PACKAGES: Final = (
    _Package(
        "onnxruntime-web",
        "1.30.0",
        "(c) Microsoft Corporation, MIT license\n  https://github.com/microsoft/onnxruntime",
        {
            "dist/ort.wasm.min.mjs": (
                "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b"
            ),
            "dist/ort-wasm-simd-threaded.mjs": (
                "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b"
            ),
            "dist/ort-wasm-simd-threaded.wasm": (
                "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2"
            ),
        },
    ),
    _Package(
        "@huggingface/tokenizers",
        "0.2.0",
        "(c) Hugging Face, Apache License 2.0\n  https://github.com/huggingface/tokenizers.js",
        {
            "dist/tokenizers.min.mjs": (
                "258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a"
            ),
        },
    ),
)


def packages_notice() -> str:
    """Return the names, licences and homes of the packages."""
    lines = [f"{one.name} {one.version}, {one.origin}\n" for one in _PACKAGES]
    head = "This folder has files of these packages, unchanged:\n\n"
    return head + "".join(lines)


def package_files(folder: Path | None) -> dict[str, bytes]:
    """Return the files of the packages by name.

    Args:
        folder: A folder node_modules with the packages. None means the cache, or else a download
            from the npm registry.

    Raises:
        ConfigError: The folder does not have these versions.
        DataError: The download failed, or the disk is full.
    """
    contents: dict[str, bytes] = {}
    for package in _PACKAGES:
        stored = folder or cache_folder("packages")
        read = {path: _read(stored / package.name / path) for path in package.files}
        if not _is_right(package, read):
            if folder is not None:
                raise ConfigError(
                    f"{folder} does not have {package.name} {package.version}, or its files differ "
                    f"from the published ones. Run `npm install {_requirements()}` in its parent "
                    f"folder, or leave out {argument('packages')} to download the files."
                )
            read = _download(package, stored / package.name)
        contents |= {Path(path).name: content for path, content in read.items()}
    return contents


def _requirements() -> str:
    return " ".join(f"{package.name}@{package.version}" for package in _PACKAGES)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _is_right(package: _Package, contents: dict[str, bytes]) -> bool:
    return all(
        hashlib.sha256(contents.get(path, b"")).hexdigest() == sha256
        for path, sha256 in package.files.items()
    )


def _download(package: _Package, cache: Path) -> dict[str, bytes]:
    """Download a package, and store its files in the cache."""
    advice = (
        f"Check the network and try again, or run `npm install {_requirements()}` elsewhere, copy "
        f"the folder node_modules, and name it with {argument('packages')}."
    )
    try:
        with urllib.request.urlopen(package.address, timeout=_TIMEOUT) as response:  # noqa: S310
            archive = response.read()
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            contents = {
                path: _member(members, f"package/{path}") for path in package.files
            }
    except (OSError, tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(
            f"{package.address} cannot be downloaded: {error}. {advice}"
        ) from error
    if not _is_right(package, contents):
        raise DataError(
            f"{package.address} does not have the expected content: its SHA-256 differs, so it is "
            f"not used. {advice}"
        )
    with disk_faults(cache, "writing the packages", setting=CACHE_VARIABLE):
        for path, content in contents.items():
            (cache / path).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(cache / path, content)
    return contents


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    return b"" if file is None else file.read()

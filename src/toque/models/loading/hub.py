"""A model's folder on this machine, from a path or a Hugging Face hub name."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from toque.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_PROBE_SECONDS = 5.0


def resolve_folder(
    path: str,
    *,
    setting: str = "model.start_from",
    needs: tuple[str, ...] = ("config.json", "*.safetensors"),
    also: Iterable[str] = ("*.json", "*.model", "*.txt"),
) -> Path:
    """The folder `path` names: itself, or the hub's copy of that name, fetched when needed.

    A copy already in the hub's cache is used without asking the network. Otherwise the hub is
    asked once, briefly, before a download starts, so a machine without a network answers in
    seconds and not after the hub client's minute of retries.

    Args:
        path: A folder, or a hub name such as "google/flan-t5-small".
        setting: The configuration's name for it, for the message.
        needs: File patterns the folder must hold to be taken from the cache.
        also: Further patterns to fetch.

    Raises:
        ConfigError: no such folder and no such name, or the hub cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{setting} is {path}, which is a file. Name the folder that holds it.")
    if not _HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"{setting} is {path}, and there is no such folder. Name a Hugging Face folder, "
            'or a hub name such as "google/flan-t5-small".'
        )
    patterns = [*needs, *also]
    cached = _cached(path, patterns)
    if cached is not None and all(any(cached.glob(pattern)) for pattern in needs):
        return cached
    return _downloaded(path, patterns, setting)


def _cached(name: str, patterns: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _downloaded(name: str, patterns: list[str], setting: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{setting} is {name}: there is no such folder, the hub's cache does not hold it, and "
            "HF_HUB_OFFLINE is set. Name a folder, or unset HF_HUB_OFFLINE to download."
        )
    _probe(constants.ENDPOINT, name, setting)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{setting} is {name}: there is no such folder, and {constants.ENDPOINT} did not give "
            f"it: {reason} Check the name; for a private or gated model, log in with `hf auth "
            "login` first."
        ) from error


def _probe(endpoint: str, name: str, setting: str) -> None:
    """One short request; any answer, even a refusal, means the hub can be reached."""
    url = f"{endpoint}/{name}/resolve/main/config.json"
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310  # the hub client's own URL
    try:
        urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        raise ConfigError(
            f"{setting} is {name}: there is no such folder in {Path.cwd()}, and the hub at "
            f"{endpoint} cannot be reached ({error}). Name a folder that holds the model, or "
            f"connect this machine to the network{_proxy_hint()}."
        ) from error


def _proxy_hint() -> str:
    proxies = [v for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY") if v in os.environ]
    return f" (the proxy in {proxies[0]} was used)" if proxies else ""

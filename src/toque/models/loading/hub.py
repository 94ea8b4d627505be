"""Hugging Face hub: the local folder of a path or hub name, and the upload of a finished folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from toque.errors import ConfigError, ToqueError, argument, in_shell
from toque.user_paths import named_path

MODEL_FILES = ("config.json", "*.safetensors")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")
_TIMEOUT_SECONDS = 5.0  # time limit for the hub's first response
_OPTIONAL_FILES = ("*.json", "*.model", "*.txt", "README.md")
# A second copy of the weights, in Mistral's format.
_IGNORED_FILES = ("consolidated*.safetensors",)


def find_local_folder(
    path: str,
    *,
    needs: tuple[str, ...] = MODEL_FILES,
    also: tuple[str, ...] = _OPTIONAL_FILES,
) -> Path | None:
    """Return the folder of a path, or the hub's complete copy in the cache; None without either."""
    folder = named_path(path)
    if folder.is_dir():
        return folder
    if not _names_repository(path):
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = _snapshot(path, (*needs, *also), local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    has_files = all(any(cached.glob(pattern)) for pattern in needs)
    return cached if has_files and _has_every_shard(cached) else None


def _snapshot(
    name: str, patterns: tuple[str, ...], *, local_files_only: bool = False
) -> Path:
    """Return the cached copy of a repository's files. Download the missing ones if allowed."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name,
        allow_patterns=[*patterns],
        ignore_patterns=[*_IGNORED_FILES],
        local_files_only=local_files_only,
    )
    return Path(folder)


def _has_every_shard(folder: Path) -> bool:
    """False if an interrupted download left only some shards, which the library may ignore."""
    n_shards: Counter[tuple[str, int]] = Counter()
    for file in folder.iterdir():
        if shard := _SHARD.fullmatch(file.name):
            stem, total = shard.groups()
            n_shards[stem, int(total)] += 1
    return all(n == total for (_, total), n in n_shards.items())


def resolve_folder(
    path: str,
    *,
    setting: str = "model.start_from",
    needs: tuple[str, ...] = MODEL_FILES,
    also: tuple[str, ...] = _OPTIONAL_FILES,
    error: type[ToqueError] = ConfigError,
) -> Path:
    """Return the folder of a path, or download the hub repository of that name.

    A cached copy is used without the network if it has the files in `needs`.

    Args:
        path: A folder, or a hub name.
        setting: Name of the setting, for error messages.
        needs: Patterns of required files.
        also: Patterns of other files to download.
        error: Class of the raised errors.
    """
    folder = named_path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise error(
            f"{setting} is {path}, which is a file. Use the folder that contains it."
        )
    if not _names_repository(path):
        raise error(
            f"{setting} is {path}, but there is no such folder. Use a Hugging Face folder, or a "
            'hub name such as "google/flan-t5-small".'
        )
    cached = find_local_folder(path, needs=needs, also=also)
    if cached is not None:
        return cached
    return _download(path, (*needs, *also), setting=setting, error=error)


def _download(
    path: str, patterns: tuple[str, ...], *, setting: str, error: type[ToqueError]
) -> Path:
    """Download files of a hub repository to the cache. Raise `error` if that fails."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    missing = f"{setting} is {path}: there is no such folder"
    if constants.HF_HUB_OFFLINE:
        raise error(
            f"{missing}, it is not in the hub's cache, and HF_HUB_OFFLINE is set. Use a folder, or "
            "unset HF_HUB_OFFLINE to download the model."
        )
    try:
        # This request comes first, because only it has a time limit and no retries. Without a
        # network, hf_hub_download retried for 23 s, and snapshot_download waited forever for a
        # proxy that accepted the connection and did not answer (huggingface_hub 2.4.0).
        HfApi(endpoint=constants.ENDPOINT).repo_info(path, timeout=_TIMEOUT_SECONDS)
        return _snapshot(path, patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError) as refusal:
        reason = str(refusal).strip().splitlines()[0]
        raise error(
            f"{missing}, and {constants.ENDPOINT} refused the download: {reason} Check the name. "
            "For a private or gated model, log in with `hf auth login` first."
        ) from refusal
    except Exception as failure:  # an error of httpx, or of httpx2 in other versions
        raise error(
            f"{missing} in {Path.cwd()}, and the hub at {constants.ENDPOINT} cannot be reached "
            f"({failure}). Use a folder, or connect to the network (set HTTPS_PROXY for a proxy)."
        ) from failure


def hub_name(path: str) -> str | None:
    """Return `path` if it is the name of a hub model; None for a folder, or for "scratch"."""
    if path == "scratch" or Path(path).exists():
        return None
    return path if _names_repository(path) else None


def _names_repository(name: str) -> bool:
    """True if the hub could have a repository of this name."""
    if not _HUB_NAME.fullmatch(name):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public

    try:
        validate_repo_id(name)  # no "--" or "..", at most 96 characters
    except HFValidationError:
        return False
    return True


def refuse_push(name: str) -> None:
    """Raise a ConfigError if a folder cannot be pushed to this name, without a request."""
    from huggingface_hub import constants, get_token

    shown = argument(f"push_to={name}")
    if "/" not in name or not _names_repository(name):
        raise ConfigError(f"{shown} must name a repository on the hub, as owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{shown} needs the network, but HF_HUB_OFFLINE is set. Unset it."
        )
    if get_token() is None:
        raise ConfigError(
            f"{shown} needs a token with write access. Log in with `hf auth login`, or set "
            "HF_TOKEN."
        )


def push(folder: Path, name: str) -> None:
    """Upload a folder to a hub repository. A new repository is private.

    Raises:
        ConfigError: The upload fails.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name}"
        )
    except Exception as failure:  # an error of httpx, or of httpx2 in other versions
        reason = str(failure).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder} is complete, but {constants.ENDPOINT} refused the upload to {name}: "
            f"{reason} Check the name and the token's permissions. Then upload the folder with "
            f"`hf upload {name} {in_shell(folder)}`."
        ) from failure

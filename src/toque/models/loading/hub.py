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
_ANSWER_SECONDS = 5.0  # time limit of the hub's first answer
_ALSO = ("*.json", "*.model", "*.txt", "README.md")
# Another copy of the weights, for another program.
_NOT = ("consolidated*.safetensors",)


def folder_here(
    path: str, *, needs: tuple[str, ...] = MODEL_FILES, also: tuple[str, ...] = _ALSO
) -> Path | None:
    """Return the folder of a path, or the hub's complete copy in the cache; None without either."""
    folder = named_path(path)
    if folder.is_dir():
        return folder
    if not _names_repository(path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(
            snapshot_download(
                path,
                allow_patterns=[*needs, *also],
                ignore_patterns=[*_NOT],
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    has_files = all(any(cached.glob(pattern)) for pattern in needs)
    return cached if has_files and _has_every_shard(cached) else None


def _has_every_shard(folder: Path) -> bool:
    """True unless an interrupted download left only some shards, which the library may ignore."""
    shards = [
        shard for file in folder.iterdir() if (shard := _SHARD.fullmatch(file.name))
    ]
    counts = Counter((shard[1], int(shard[2])) for shard in shards)
    return all(n == count for (_, count), n in counts.items())


def resolve_folder(
    path: str,
    *,
    setting: str = "model.start_from",
    needs: tuple[str, ...] = MODEL_FILES,
    also: tuple[str, ...] = _ALSO,
    error: type[ToqueError] = ConfigError,
) -> Path:
    """Return the folder of a path, or download the hub's copy of that name.

    A cached copy is used without the network if it has the files in `needs`.

    Args:
        path: A folder, or a hub name.
        setting: Name of the setting, for errors.
        needs: Patterns of required files.
        also: Patterns of other files to download.
        error: Class of errors.
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
    if (cached := folder_here(path, needs=needs, also=also)) is not None:
        return cached
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    missing = f"{setting} is {path}: there is no such folder"
    if constants.HF_HUB_OFFLINE:
        raise error(
            f"{missing}, it is not in the hub's cache, and HF_HUB_OFFLINE is set. Use a folder, or "
            "unset HF_HUB_OFFLINE to download the model."
        )
    try:
        # Only this request has a time limit and is not repeated. Without a network,
        # hf_hub_download took 23 s of retries, and snapshot_download waited forever for a proxy
        # that accepted the connection and did not answer (huggingface_hub 2.4.0).
        HfApi(endpoint=constants.ENDPOINT).repo_info(path, timeout=_ANSWER_SECONDS)
        return Path(
            snapshot_download(
                path, allow_patterns=[*needs, *also], ignore_patterns=[*_NOT]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as refusal:
        reason = str(refusal).strip().splitlines()[0]
        raise error(
            f"{missing}, and {constants.ENDPOINT} refused the download: {reason} Check the name. "
            "For a private or gated model, log in with `hf auth login` first."
        ) from refusal
    except (
        Exception
    ) as failure:  # httpx's or httpx2's, depending on the library's version
        raise error(
            f"{missing} in {Path.cwd()}, and the hub at {constants.ENDPOINT} cannot be reached "
            f"({failure}). Use a folder, or connect to the network (set HTTPS_PROXY for a proxy)."
        ) from failure


def hub_name(path: str) -> str | None:
    """Return the name of a model on the hub; None for a folder, or for scratch."""
    is_hub_name = (
        path != "scratch" and _names_repository(path) and not Path(path).exists()
    )
    return path if is_hub_name else None


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
    """Raise a ConfigError if a folder cannot be pushed to this name. Nothing is written or sent."""
    from huggingface_hub import constants, get_token

    shown = argument(f"push_to={name}")
    if "/" not in name or not _names_repository(name):
        raise ConfigError(f"{shown} must be a repository of the hub: owner/name.")
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
    """Upload a folder to a repository. A new one is private.

    Raises:
        ConfigError: The hub refuses the upload.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name}"
        )
    except (
        Exception
    ) as failure:  # httpx's or httpx2's, depending on the library's version
        reason = str(failure).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder} is complete, but {constants.ENDPOINT} refused the upload to {name}: "
            f"{reason} Check the name and the token's permissions. Then upload the folder with "
            f"`hf upload {name} {in_shell(folder)}`."
        ) from failure

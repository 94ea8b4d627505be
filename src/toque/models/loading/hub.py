"""Hugging Face hub: the folder behind a path or a hub name, and the upload of a finished folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from toque.errors import ConfigError, ToqueError, argument, in_shell
from toque.user_paths import named_path

MODEL_FILES = ("config.json", "*.safetensors")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")
_ANSWER_SECONDS = 5.0


_ALSO = ("*.json", "*.model", "*.txt", "README.md")
_NOT = ("consolidated*.safetensors",)  # the same weights once more, by names of another program


def folder_here(
    path: str, *, needs: tuple[str, ...] = MODEL_FILES, also: tuple[str, ...] = _ALSO
) -> Path | None:
    """The folder of this path, or the hub's whole copy in the cache; None where there is none."""
    folder = named_path(path)
    if folder.is_dir() or not _names_repository(path):
        return folder if folder.is_dir() else None
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
    whole = all(any(cached.glob(pattern)) for pattern in needs) and _has_every_shard(cached)
    return cached if whole else None


def _has_every_shard(folder: Path) -> bool:
    """False where an interrupted download left only some shards, as the library may not know."""
    found = [shard for file in folder.iterdir() if (shard := _SHARD.fullmatch(file.name))]
    there = Counter((shard[1], int(shard[2])) for shard in found)
    return all(n == count for (_, count), n in there.items())


def resolve_folder(
    path: str,
    *,
    setting: str = "model.start_from",
    needs: tuple[str, ...] = MODEL_FILES,
    also: tuple[str, ...] = _ALSO,
    error: type[ToqueError] = ConfigError,
) -> Path:
    """The folder `path` names: itself, or the hub's copy of that name, downloaded when needed.

    A cached copy is used without the network if it holds what `needs` says. Problems are raised as
    `error`, which names the `setting`.
    """
    folder = named_path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise error(f"{setting} is {path}, which is a file. Name the folder that holds it.")
    if not _names_repository(path):
        raise error(
            f"{setting} is {path}, and there is no such folder. Name a Hugging Face folder, "
            'or a hub name such as "google/flan-t5-small".'
        )
    if (cached := folder_here(path, needs=needs, also=also)) is not None:
        return cached
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    missing = f"{setting} is {path}: there is no such folder"
    if constants.HF_HUB_OFFLINE:
        raise error(
            f"{missing}, the hub's cache does not hold it, and HF_HUB_OFFLINE is set. Name a "
            "folder, or unset HF_HUB_OFFLINE to download."
        )
    try:
        # Asked first, because only this request has a time limit and is not repeated: without a
        # network hf_hub_download took 23 s of retries, and snapshot_download never gave up on a
        # proxy that accepted the connection and stayed silent (huggingface_hub 2.4.0).
        HfApi(endpoint=constants.ENDPOINT).repo_info(path, timeout=_ANSWER_SECONDS)
        return Path(
            snapshot_download(path, allow_patterns=[*needs, *also], ignore_patterns=[*_NOT])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as refusal:
        reason = str(refusal).strip().splitlines()[0]
        raise error(
            f"{missing}, and {constants.ENDPOINT} did not give it: {reason} Check the name; for a "
            "private or gated model, log in with `hf auth login` first."
        ) from refusal
    except Exception as failure:  # httpx's or httpx2's, as the version of the library has it
        raise error(
            f"{missing} in {Path.cwd()}, and the hub at {constants.ENDPOINT} cannot be reached "
            f"({failure}). Name a folder, or connect to the network (HTTPS_PROXY names a proxy)."
        ) from failure


def hub_name(path: str) -> str | None:
    """The name that others find a model by on the hub; None for a folder, or for scratch."""
    named = path != "scratch" and _names_repository(path) and not Path(path).exists()
    return path if named else None


def _names_repository(name: str) -> bool:
    """True if the hub could have a repository of this name."""
    if not _HUB_NAME.fullmatch(name):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public

    try:
        validate_repo_id(name)  # neither "--" nor "..", at most 96 characters
    except HFValidationError:
        return False
    return True


def refuse_push(name: str) -> None:
    """Refuse, with a ConfigError, what cannot be pushed to; nothing is written or sent."""
    from huggingface_hub import constants, get_token

    shown = argument(f"push_to={name}")
    if "/" not in name or not _names_repository(name):
        raise ConfigError(f"{shown} names no repository of the hub. Write owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{shown} needs the network, and HF_HUB_OFFLINE is set. Unset it.")
    if get_token() is None:
        raise ConfigError(
            f"{shown} needs a token that may write, and none is set. Log in with `hf auth login`, "
            "or set HF_TOKEN."
        )


def push(folder: Path, name: str) -> None:
    """Copy a folder into a repository, new ones private; ConfigError where the hub refuses it."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as failure:  # httpx's or httpx2's, as the version of the library has it
        reason = str(failure).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder} is written and whole, and {constants.ENDPOINT} did not take it as {name}: "
            f"{reason} Look at the name and the token's rights, then upload the folder with `hf "
            f"upload {name} {in_shell(folder)}`."
        ) from failure

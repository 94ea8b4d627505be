"""Hub upload: a copy of a finished folder in a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument, in_shell

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_push(name: str) -> None:
    """Refuse what cannot be pushed to, before anything is written; nothing is sent.

    Raises:
        ConfigError: not a repository's name, no network wanted, or nobody logged in.
    """
    from huggingface_hub import constants, get_token

    shown = argument(f"push_to={name}")
    if not _REPOSITORY.fullmatch(name):
        raise ConfigError(f"{shown} names no repository of the hub. Write owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{shown} needs the network, and HF_HUB_OFFLINE is set. Unset it.")
    if get_token() is None:
        raise ConfigError(
            f"{shown} needs a token that may write, and none is set. Log in with `hf auth login`, "
            "or set HF_TOKEN."
        )


def push(folder: Path, name: str) -> None:
    """Copy a folder into a repository, which is made private where it does not exist.

    Raises:
        ConfigError: the hub does not take it, or cannot be reached.
    """
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

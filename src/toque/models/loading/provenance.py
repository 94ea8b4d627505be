"""Provenance of a model folder: the form its prompts take, and its tokenizer as training read it.

A model that Toque wrote holds `toque/model.json`, the record, and `toque/tokenizer.json` as it lies
in the store, beside the files that transformers reads.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from toque.errors import CheckpointError
from toque.models.generation.options import GenerationOptions
from toque.storage.atomic import sha256_of

Form = Literal["recipes", "pairs", "conversations", "documents", "gaps"]
"""Kinds of training: requests for recipes and questions about them; prompts of the user's own;
conversations by a chat template; the beginning of a text, which it continues; or texts with gaps,
which it fills."""
FOLDER: Final = "toque"
RECORD: Final = "model.json"
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")
WRITTEN: Final = (
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"),
    *(*_TOKENIZER, "special_tokens_map.json", "added_tokens.json", f"{FOLDER}/{RECORD}"),
    *(f"{FOLDER}/{name}" for name in _TOKENIZER),
)
"""Names of the files in a model folder that Toque writes; files of other names are the user's."""
RECIPE_RUN_TOKENS: Final = 12
"""Tokens of the shortest run that a recipe is not let write twice. The likeliest text of a model
may never end: 19 of 122 of SmolLM2's after an hour on one magazine did not, which 12 took from a
recipe score of .848 to .926 (16: .914, 24: .884), and models from scratch from .762 to .806 and
from .954 to .969. Of 2,400 recipes that people wrote 11 % hold such a run twice, and 35 % one of 8
tokens."""
_MOST_BYTES: Final = 1 << 20
# What `toque.sources.documents.template_parts` reads, which stands no lower than this module.
_TEMPLATE: Final = re.compile(r"(?:[^{}]|\{\{|\}\}|\{[^{}:!]+:?\})*")


class OwnTask(msgspec.Struct, frozen=True):
    """A task of its maker's own, as the model is asked."""

    name: str
    prompt: str | tuple[str, ...]
    """Template over the fields of a record, or a field, or several."""
    classes: tuple[str, ...] = ()
    """Answers that there are; () for any text."""

    def __post_init__(self) -> None:
        """Raise a ValueError for a prompt that is no template: a record may be anyone's."""
        if isinstance(self.prompt, str) and not _TEMPLATE.fullmatch(self.prompt):
            raise ValueError(f"the prompt {self.prompt[:80]!r} is no template")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a model."""

    form: Form
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    """Longest text it was trained to write."""
    tasks: list[str] = []  # tasks about recipes that it was trained on; see `data.tasks`
    own_tasks: list[OwnTask] = []
    tokenizer_json_sha256: str = ""
    """Hash of plain transformers' file. Once it is another, `toque/` no longer describes it."""

    @property
    def knows_recipes(self) -> bool:
        """True for a model that was trained on recipes."""
        return self.form == "recipes"

    @property
    def no_repeat_ngram_size(self) -> int:
        """The option of this name where a person leaves it out, for texts that are not JSON."""
        return RECIPE_RUN_TOKENS if self.knows_recipes else 0

    def completed(self, options: GenerationOptions, *, in_json: bool = False) -> GenerationOptions:
        """The options with the model's own values where they have none; JSON repeats its names."""
        size = options.no_repeat_ngram_size
        if size is None:
            size = 0 if in_json else self.no_repeat_ngram_size
        most = options.max_new_tokens or self.max_new_tokens
        return replace(options, max_new_tokens=most, no_repeat_ngram_size=size)

    def files(self) -> dict[str, str]:
        """The record's own file, by its place in the model folder."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        return {f"{FOLDER}/{RECORD}": data.decode() + "\n"}


def provenance_of(folder: Path) -> Provenance | None:
    """The record of a model folder; None without one, CheckpointError if it cannot be read."""
    path = folder / FOLDER / RECORD
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise msgspec.DecodeError(f"it is {path.stat().st_size:,} bytes long")
        found = msgspec.json.decode(path.read_bytes(), type=Provenance)
    except (msgspec.DecodeError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} does not say how the model was trained: {error}. Copy the model again; "
            f"without the folder {FOLDER}/ it is asked as a model of recipes."
        ) from error
    return found


def tokenizer_files_in(folder: Path) -> Path:
    """The folder of a model's tokenizer as training read it: its own, or `folder`."""
    own, portable = folder / FOLDER, folder / "tokenizer.json"
    if not (own / "tokenizer.json").is_file() or not portable.is_file():
        return folder
    record = provenance_of(folder)
    same = record is not None and record.tokenizer_json_sha256 == sha256_of(portable)
    return own if same else folder

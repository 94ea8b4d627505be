"""Settings of `prepare`: everything that decides what a store holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from toque.errors import ConfigError

FamilyKind = Literal["decoder", "encoder-decoder"]
OnOverlong = Literal["error", "drop", "truncate", "split", "auto"]
Dedup = Literal["none", "exact", "near"]
TRAINED = "trained:"
USUAL_PROMPT, USUAL_TARGET = 256, 512
"""Limits where nothing else decides."""
LIMITS = ("max_prompt_tokens", "max_target_tokens")
DEFAULT_BAD_SHARE = 0.5
"""Over half of the records unusable: the file is likely of another format."""


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Everything that changes what a store holds.

    `on_overlong` "auto" truncates pairs and splits documents. `max_bad_share` is the largest share
    of a source's records that its reader may refuse; above it, the source is an error.
    """

    family_kind: FamilyKind
    tokenizer: str
    max_prompt_tokens: int | None = USUAL_PROMPT
    """None: chosen from the data (`source_sample`)."""
    max_target_tokens: int | None = USUAL_TARGET
    room: int | None = None
    """Tokens that a prompt and its target may have together, for limits that are chosen; no
    setting, and not recorded where none is."""
    on_overlong: OnOverlong = "auto"
    validation_fraction: float = 0.1
    max_examples: int | None = None
    min_quality: float = 0.0
    dedup: Dedup = "exact"
    tasks: tuple[str, ...] = ("write",)
    max_bad_share: float = DEFAULT_BAD_SHARE
    max_files: tuple[int | None, ...] = ()
    """Files read of each source; recorded where a source has a limit, to compare sources that are
    not on this machine."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name, value, allowed in (
            ("family_kind", self.family_kind, get_args(FamilyKind)),
            ("on_overlong", self.on_overlong, get_args(OnOverlong)),
            ("dedup", self.dedup, get_args(Dedup)),
        ):
            if value not in allowed:
                raise ConfigError(f"data.{name} is {value!r}; it can be {', '.join(allowed)}.")
        for name, number in (
            ("max_prompt_tokens", self.max_prompt_tokens),
            ("max_target_tokens", self.max_target_tokens),
        ):
            if number is not None and number < 4:
                raise ConfigError(
                    f"data.{name} is {number}; fewer than 4 tokens hold no text beside the "
                    "special ones. A usual value is 256."
                )
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(
                f"data.validation_fraction is {self.validation_fraction}; it is a share, at least "
                "0 and below 1, e.g. 0.1."
            )
        if self.max_examples is not None and self.max_examples < 1:
            raise ConfigError(
                f"data.max_examples is {self.max_examples}; give a positive number, or null for "
                "all."
            )

    @property
    def open_limits(self) -> list[str]:
        """The limits that are chosen from the data, by name."""
        return [name for name in LIMITS if getattr(self, name) is None]

    @property
    def splits_documents(self) -> bool:
        """True if a document that is too long is cut into rows."""
        return self.on_overlong in ("auto", "split")

    @property
    def limits(self) -> tuple[int, int]:
        """Longest prompt and target, once both are known."""
        assert self.max_prompt_tokens is not None and self.max_target_tokens is not None  # noqa: PT018
        return self.max_prompt_tokens, self.max_target_tokens

    def as_recorded(self) -> dict[str, Any]:
        """The settings as manifests record them and fingerprints cover them."""
        values = {**asdict(self), "tasks": list(self.tasks), "max_files": list(self.max_files)}
        del values["room"]
        if not self.max_files:
            del values["max_files"]
        return values

    def filled_from(self, recorded: Mapping[str, Any]) -> PrepareSettings:
        """These settings with the limits that a store chose in place of open ones."""
        chosen = set(self.open_limits).intersection(recorded.get("chosen", ()))
        return replace(self, **{name: recorded[name] for name in chosen})

    @property
    def trained_vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer to train; None if it is given.

        Raises:
            ConfigError: "trained:" is not followed by a whole number.
        """
        if not self.tokenizer.startswith(TRAINED):
            return None
        size = self.tokenizer.removeprefix(TRAINED)
        if not size.isdecimal():
            raise ConfigError(
                f"model.tokenizer is {self.tokenizer!r}; after trained: comes the size of the "
                'vocabulary, e.g. "trained:8192".'
            )
        return int(size)

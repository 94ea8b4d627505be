"""Model to start from, as a first configuration meets it: its memory, lengths and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from toque.config import RunConfig
from toque.data.prepare.conversation_rows import with_template
from toque.data.prepare.source_sample import choose_limits
from toque.data.tokenizer.chat import template_text
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import DataError
from toque.hardware.memory import in_words
from toque.sources.conversations import ConversationReader
from toque.sources.records import Source
from toque.sources.source_files import find_files
from toque.workflows.configure import configure
from toque.workflows.prepared_store import prepare_settings

_ADAPTER_FROM: Final = 1_000_000_000
"""Parameters from which on an adapter is proposed even where all weights fit. A guess: few data
move a larger model as far through an adapter, and its checkpoints stay small."""
_LORA: Final = "adapter: {kind: lora}"


class SeenBase(NamedTuple):
    """What a model asks of the settings, each with the reason as a comment."""

    adapter: str  # the line, which is a comment where all weights are to be trained
    uses_adapter: bool
    data: str  # lines of the data section
    remarks: tuple[str, ...]  # sentences on lengths that are cut and memory that is short


def base_seen(config: RunConfig, sources: Sequence[Source]) -> SeenBase:
    """Look at the model that `config` starts from, which is on this machine, and the sources.

    Raises:
        ConfigError: the model cannot be trained on these data, or cannot be read.
        DataError: its tokenizer cannot be used.
    """
    template, data, remarks = "auto", list[str](), list[str]()
    talks = any(isinstance(source.reader, ConversationReader) for source in sources)
    if sources and not config.model.tokenizer_source.startswith("trained:"):
        try:
            limits, remarks, own = _lengths(config, sources, template, talks=talks)
            why = "the base's own" if own else "headings; the base has no chat template"
        except DataError as error:
            if not talks or "chat template" not in str(error):
                raise
            template, why = "plain", "headings, because the base's own does not end its answers"
            limits, remarks, _ = _lengths(config, sources, template, talks=talks)
        if talks:
            data.append(f"  chat_template: {template}   # {why}")
        for name, limit in limits.items():
            data.append(f"  {name}: {limit}   # by the longest that was measured")
        config = configure(config, data=limits)
    line, uses_adapter, short = _adapter(config)
    return SeenBase(line, uses_adapter, "".join(f"{one}\n" for one in data), (*remarks, *short))


def _lengths(
    config: RunConfig, sources: Sequence[Source], template: str, *, talks: bool
) -> tuple[dict[str, int], list[str], bool]:
    """The limits that cut nothing the model can read; sentences on what is cut all the same.

    True comes with them where the base has a chat template.
    """
    settings = replace(prepare_settings(config), chat_template=template)
    codec = load_codec(resolve_tokenizer(settings.tokenizer))
    own = template_text(codec.settings) is not None
    if talks:
        with_template(codec, settings)
    chosen, said = choose_limits(find_files(sources), codec, settings, percentile=100)
    names = [name for name in settings.open_limits if any(_side(name) in one for one in said)]
    limits = {name: int(getattr(chosen, name)) for name in names}
    return limits, [one for one in said if "cuts" in one or "no more" in one], own


def _side(limit: str) -> str:
    return f"Longest {limit.split('_')[1]}"


def _adapter(config: RunConfig) -> tuple[str, bool, list[str]]:
    """The adapter's line, whether it is one, and a sentence where that does not fit either."""
    from toque.workflows.plan.planned import memory_to_train  # loads torch

    n, memory = memory_to_train(config)
    millions, room = f"{n / 1e6:,.0f} M", in_words(memory.room)
    if memory.fits and n < _ADAPTER_FROM:
        why = f"all {millions} weights take {in_words(memory.total)} of {room}; this, less"
        return f"# {_LORA}   # {why}", False, []
    why = f"all {millions} weights would take {in_words(memory.total)} of {room}"
    changes: dict[str, Any] = {"adapter": {"kind": "lora"}}
    _, smaller = memory_to_train(configure(config, **changes))
    short = (
        f"Training takes {in_words(smaller.total)} of {room} even with an adapter: `toque plan` "
        "says what takes less, or start from a smaller model."
    )
    return f"{_LORA}   # {why}", True, [] if smaller.fits else [short]

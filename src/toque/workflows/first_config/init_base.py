"""Model to start from, as a first configuration meets it: its memory, lengths and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from toque.config import RunConfig
from toque.config.dump import flow
from toque.config.schema import TRAINED
from toque.data.prepare.conversation_rows import with_template
from toque.data.prepare.source_sample import choose_limits
from toque.data.tokenizer.chat import template_text
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import DataError
from toque.models.loading.hub import folder_here
from toque.sources.conversations import ConversationReader
from toque.sources.records import Source, examples_in
from toque.sources.source_files import blocks_of, find_files
from toque.workflows.configure import configure
from toque.workflows.first_config.sizing import MAX_BATCH_TOKENS
from toque.workflows.prepared_store import prepare_settings

_ADAPTER_FROM: Final = 1_000_000_000
"""Parameters from which on an adapter is proposed even where all weights fit. A guess: few data
move a larger model as far through an adapter, and its checkpoints stay small."""
_LETTERS: Final = 20_000
"""Characters that are enough to see whether a tokenizer knows their script."""
_ADAPTER: Final[Mapping[str, str]] = {"kind": "lora", "target_modules": "all"}
"""Adapter that is proposed, of every layer: in one pass over 500 recipes 135 M reach 0.526 bits a
byte, 0.562 with the default's q and v, 0.512 where all weights are trained (lab/dial.md)."""
_LORA: Final = f"adapter: {flow(_ADAPTER)}"
_NO_ADAPTER: Final = f"# {_LORA}   # train a small adapter and leave the model's own weights alone"
NOT_SEEN: Final = (
    "{start} is not on this machine, so its size, chat template and lengths were not looked at."
)


class SeenBase(NamedTuple):
    """Settings that a model asks for, each with the reason as a comment."""

    longest: int = 1  # tokens of the longest example
    tokens_each: float | None = None
    """Tokens of an example that are trained, with the base's tokenizer; None if not measured."""
    adapter: str = _NO_ADAPTER
    """The line of it, which is a comment where all weights are to be trained."""
    data: str = ""  # lines of the data section
    remarks: tuple[str, ...] = ()  # sentences on what is cut, memory that is short, or no look
    rate: float | None = None  # tokens a second that this machine trains; None: not looked at
    parameters: int = 0  # of the model, 0: not looked at

    @property
    def is_small(self) -> bool:
        """True if the model was looked at, and is small enough to be loaded for a trial."""
        return 0 < self.parameters < _ADAPTER_FROM and not self.is_adapted

    @property
    def is_adapted(self) -> bool:
        """True if an adapter is trained, False if all weights are."""
        return not self.adapter.startswith("#")


def base_seen(
    config: RunConfig, sources: Sequence[Source], example: float | None = None
) -> SeenBase:
    """Look at the model that `config` starts from, if it is on this machine, and the sources.

    `example`: tokens of an example on average; None where nobody has looked.

    Raises:
        ConfigError: the model cannot be trained on these data, or cannot be read.
        DataError: its tokenizer cannot be used.
    """
    start, data, remarks, longest = config.model.start_from, list[str](), list[str](), 1
    tokens_each: float | None = None
    if folder_here(start) is None:
        return SeenBase(remarks=(NOT_SEEN.format(start=start),))
    talks = any(isinstance(source.reader, ConversationReader) for source in sources)
    if sources and not config.model.tokenizer_source.startswith(TRAINED):
        template = "auto"
        try:
            limits, tokens_each, remarks, own = _lengths(config, sources, template, talks=talks)
            why = "the base's own" if own else "headings; the base has no chat template"
        except DataError as error:
            if not talks or "chat template" not in str(error):
                raise
            template, why = "plain", "headings, because the base's own does not end its answers"
            limits, tokens_each, remarks, _ = _lengths(config, sources, template, talks=talks)
        data += [f"  chat_template: {template}   # {why}\n"] if talks else []
        data += [
            f"  {one}: {n}   # by the longest that was measured\n" for one, n in limits.items()
        ]
        longest = sum(limits.values())
        config = configure(config, data=limits)
    largest = max(longest, MAX_BATCH_TOKENS)
    config = configure(config, train={"batch": f"{largest} tokens"})
    seen = _fitted(config, tokens_each or example)
    told = (*remarks, *seen.remarks)
    return seen._replace(longest=longest, tokens_each=tokens_each, data="".join(data), remarks=told)


def _lengths(
    config: RunConfig, sources: Sequence[Source], template: str, *, talks: bool
) -> tuple[dict[str, int], float | None, list[str], bool]:
    """Choose the limits that cut nothing the model can read, and measure the tokens per example.

    Sentences about what is cut all the same follow, and True if the base has a chat template.
    """
    settings = replace(prepare_settings(config), chat_template=template)
    codec = load_codec(resolve_tokenizer(settings.tokenizer))
    own = template_text(codec.settings) is not None
    if talks:
        with_template(codec, settings)
    chosen, said, tokens_each = choose_limits(find_files(sources), codec, settings, percentile=100)
    measured = {"max_prompt_tokens": "Longest prompt", "max_target_tokens": "Longest target"}
    both = "Longest conversation"  # which the two limits bound together
    names = [n for n, own in measured.items() if any(one.startswith((own, both)) for one in said)]
    limits = {name: int(getattr(chosen, name)) for name in names}
    told = [one for one in said if "cuts" in one or "no more" in one]
    told += _unknown_script(codec, sources, config.model.start_from)
    return limits, tokens_each, told, own


def _unknown_script(codec: Codec, sources: Sequence[Source], base: str) -> list[str]:
    """Warn if the base's tokenizer needs more tokens than characters, because it writes bytes."""
    texts, letters = list[str](), 0
    blocks = ((file, block) for file in find_files(sources) for block in blocks_of(file))
    for example in (e for file, block in blocks for e in examples_in(block, file.reader).examples):
        texts.append(example.text)
        letters += len(texts[-1])
        if letters > _LETTERS:
            break
    tokens = int(codec.encode_flat(texts).ends[-1]) if texts else 0
    if tokens <= letters:
        return []
    said = (
        f"The tokenizer of {base} takes {tokens / letters:.1f} tokens for each character of these "
        "texts: it hardly covers their script, and neither does the model. Start from a base in "
        "their language, or from scratch with a new tokenizer."
    )
    return [said]


def _fitted(config: RunConfig, example: float | None) -> SeenBase:
    """The model's size and rate, and an adapter where its memory or size asks for one."""
    # With torch, which a configuration from scratch does without.
    from toque.hardware.memory import in_words
    from toque.workflows.plan.planned import outlook_of

    whole = outlook_of(config, example)
    n, memory = whole.parameters, whole.memory
    millions, room = f"{n / 1e6:,.0f} M", in_words(memory.room)
    if memory.fits and n < _ADAPTER_FROM:
        why = f"all {millions} weights take {in_words(memory.total)} of {room}; this, less"
        adapter = f"# {_LORA}   # {why}"
        return SeenBase(adapter=adapter, rate=whole.tokens_per_second(), parameters=n)
    why = f"all {millions} weights would take {in_words(memory.total)} of {room}"
    adapted = outlook_of(configure(config, adapter=_ADAPTER), example)
    smaller = adapted.memory
    short = (
        f"Training takes {in_words(smaller.total)} of {room} even with an adapter: `toque plan` "
        "says what takes less, or start from a smaller model."
    )
    return SeenBase(
        adapter=f"{_LORA}   # {why}",
        remarks=() if smaller.fits else (short,),
        rate=adapted.tokens_per_second(),
        parameters=n,
    )

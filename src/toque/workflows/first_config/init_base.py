"""Base model of a first configuration: its memory, lengths and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from toque.config import RunConfig
from toque.config.dump import flow
from toque.config.schema import TRAINED
from toque.data.prepare.conversation_rows import set_chat_template
from toque.data.prepare.source_sample import choose_limits
from toque.data.tokenizer.chat import template_text
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import DataError
from toque.models.loading.hub import find_local_folder
from toque.sources.conversations import CONVERSATIONS
from toque.sources.records import Example, Source, examples_in
from toque.sources.source_files import blocks_of, find_files
from toque.workflows.configure import configure
from toque.workflows.first_config.tuning import MAX_BATCH_TOKENS
from toque.workflows.prepared_store import prepare_settings

_ADAPTER_FROM: Final = 1_000_000_000
"""Minimum number of parameters for an adapter if all weights fit into memory. A guess: an adapter
has smaller checkpoints, and learns as much from little data."""
_SCRIPT_CHARACTERS: Final = 20_000
"""Number of characters that are enough to check whether a tokenizer covers their script."""
_ADAPTER: Final[Mapping[str, str]] = {"kind": "lora", "target_modules": "all"}
"""Proposed adapter, on all layers. After one pass over 500 recipes, a model of 135 M parameters
reaches 0.526 bits per byte with it, 0.562 with an adapter on q and v, and 0.512 if all weights are
trained (lab/dial.md).
"""
_LORA: Final = f"adapter: {flow(_ADAPTER)}"
_NO_ADAPTER: Final = (
    f"# {_LORA}   # train a small adapter and freeze the weights of the model"
)
NOT_SEEN: Final = (
    "{start} is not on this machine, so its size, chat template and lengths were not "
    "measured."
)


class MeasuredBase(NamedTuple):
    """Settings for a base model, with the reason for each as a comment."""

    longest: int = 1
    """Length of the longest example, in tokens."""
    tokens_each: float | None = None
    """Mean number of trained tokens per example with the base's tokenizer. None if not measured.
    """
    adapter: str = _NO_ADAPTER
    """Line with the adapter. It is a comment if all weights are trained."""
    data: str = ""
    """Lines for the data section."""
    remarks: tuple[str, ...] = ()
    """Messages about cut examples, too little memory, or an absent model."""
    rate: float | None = None
    """Training speed of this machine in tokens per second, or None if the model is absent."""
    parameters: int = 0
    """Number of parameters, or 0 if the model is absent."""

    @property
    def is_small(self) -> bool:
        """True if the model is on this machine and small enough for a trial."""
        return 0 < self.parameters < _ADAPTER_FROM and not self.is_adapted

    @property
    def is_adapted(self) -> bool:
        """True if an adapter is trained, False if all weights are."""
        return not self.adapter.startswith("#")


def measure_base(
    config: RunConfig, sources: Sequence[Source], example: float | None = None
) -> MeasuredBase:
    """Measure the base model of a configuration, if it is on this machine.

    Args:
        config: Configuration with the base model.
        sources: The sources of the data.
        example: Mean number of tokens per example, if known. Each answer of a pair is an example.

    Raises:
        ConfigError: The model cannot be read, or cannot be trained on these data.
        DataError: The tokenizer of the model is not usable.
    """
    start = config.model.start_from
    if find_local_folder(start) is None:
        return MeasuredBase(remarks=(NOT_SEEN.format(start=start),))

    data = ""
    lengths = _Lengths()
    if sources and not config.model.tokenizer_source.startswith(TRAINED):
        lengths, data = _measure_with_template(config, sources)
        for name, n in lengths.limits.items():
            data += f"  {name}: {n}   # the longest measured one\n"
        config = configure(config, data=lengths.limits)

    longest = sum(lengths.limits.values()) or 1
    if config.objective.kind == "dpo":
        longest *= 2  # both answers of a pair are in one row
    if not config.objective.learns_from_rewards:  # such a batch is a number of prompts
        largest = max(longest, MAX_BATCH_TOKENS)
        config = configure(config, train={"batch": f"{largest} tokens"})
    base = _choose_adapter(config, lengths.tokens_each or example)
    return base._replace(
        longest=longest,
        tokens_each=lengths.tokens_each,
        data=data,
        remarks=(*lengths.remarks, *base.remarks),
    )


def _measure_with_template(
    config: RunConfig, sources: Sequence[Source]
) -> tuple[_Lengths, str]:
    """Measure the lengths with the base's chat template, or with headings if it is unusable.

    Also return the line of `data.chat_template` for conversations.
    """
    names = (source.reader.recorded_name for source in sources)
    has_conversations = any(name.startswith(CONVERSATIONS) for name in names)
    measure = partial(
        _measure_lengths, config, sources, has_conversations=has_conversations
    )
    template = "auto"
    reason = "the base's own"
    try:
        lengths = measure(template)
        if not lengths.has_template:
            reason = "headings; the base has no chat template"
    except DataError as error:
        if not has_conversations or "chat template" not in str(error):
            raise
        template = "plain"
        reason = "headings, because the base's own does not end its answers"
        lengths = measure(template)
    if not has_conversations:
        return lengths, ""
    return lengths, f"  chat_template: {template}   # {reason}\n"


class _Lengths(NamedTuple):
    """Lengths of examples with the tokenizer of a base."""

    limits: Mapping[str, int] = {}
    """Settings for the longest prompt and target."""
    tokens_each: float | None = None
    """Mean number of trained tokens per example."""
    remarks: Sequence[str] = ()
    """Messages about examples that are cut."""
    has_template: bool = False
    """True if the base has a chat template."""


def _measure_lengths(
    config: RunConfig,
    sources: Sequence[Source],
    template: str,
    *,
    has_conversations: bool,
) -> _Lengths:
    """Measure the examples, and choose limits that cut only what exceeds the context length."""
    settings = replace(prepare_settings(config), chat_template=template)
    codec = load_codec(resolve_tokenizer(settings.tokenizer))
    has_template = template_text(codec.settings) is not None
    if has_conversations:
        set_chat_template(codec, settings)
    chosen, messages, tokens_each = choose_limits(
        find_files(sources), codec, settings, percentile=100
    )

    # A limit was measured if a message reports it. The two limits share the longest conversation.
    limits = {}
    for name, heading in (
        ("max_prompt_tokens", "Longest prompt"),
        ("max_target_tokens", "Longest target"),
    ):
        headings = (heading, "Longest conversation")
        if any(message.startswith(headings) for message in messages):
            limits[name] = int(getattr(chosen, name))
    remarks = [message for message in messages if " cut" in message]
    remarks += _check_script(codec, sources, config.model.start_from)
    return _Lengths(limits, tokens_each, remarks, has_template)


def _check_script(codec: Codec, sources: Sequence[Source], base: str) -> list[str]:
    """Warn if the base's tokenizer falls back to bytes, i.e. needs more tokens than characters."""
    texts = []
    n_characters = 0
    for example in _read_examples(sources):
        texts.append(example.text)
        n_characters += len(example.text)
        if n_characters > _SCRIPT_CHARACTERS:
            break
    n_tokens = int(codec.encode_flat(texts).ends[-1]) if texts else 0
    if n_tokens <= n_characters:
        return []
    warning = (
        f"The tokenizer of {base} needs {n_tokens / n_characters:.1f} tokens per character of "
        "these texts. It hardly covers their script, and neither does the model. Start from a base "
        "in their language, or from scratch with a new tokenizer."
    )
    return [warning]


def _read_examples(sources: Sequence[Source]) -> Iterator[Example]:
    for file in find_files(sources):
        for block in blocks_of(file):
            yield from examples_in(block, file.reader).examples


def _choose_adapter(config: RunConfig, example: float | None) -> MeasuredBase:
    """Measure the model, and propose an adapter for a large one."""
    # These load torch, which a configuration from scratch does not need.
    from toque.hardware.memory import in_words
    from toque.workflows.plan.run_estimate import predict_training

    full = predict_training(config, example)
    n = full.parameters
    memory = in_words(full.memory.room)
    weights = f"all {n / 1e6:,.0f} M weights"
    needed = f"{in_words(full.memory.total)} of {memory}"
    if full.memory.fits and n < _ADAPTER_FROM:
        adapter = f"# {_LORA}   # {weights} need {needed}; an adapter needs less"
        return MeasuredBase(
            adapter=adapter, rate=full.tokens_per_second(), parameters=n
        )

    adapted = predict_training(configure(config, adapter=_ADAPTER), example)
    remarks = []
    if not adapted.memory.fits:
        remarks.append(
            f"Training needs {in_words(adapted.memory.total)} of {memory} even with an adapter. "
            "`toque plan` lists settings that need less, or start from a smaller model."
        )
    return MeasuredBase(
        adapter=f"{_LORA}   # {weights} would need {needed}",
        remarks=tuple(remarks),
        rate=adapted.tokens_per_second(),
        parameters=n,
    )

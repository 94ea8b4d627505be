"""Chat templates, which turn conversations into the ids that a chat model was trained on.

A template has access to the turns and special tokens only, see `template_process`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from toque.data.tokenizer.codec import Codec, FamilyKind, generation_bounds
from toque.data.tokenizer.template_process import (
    MAX_SECONDS,
    REASONING_FIELDS,
    Json,
    Message,
    Span,
    end_child,
    start_child,
)
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError
from toque.models.loading.provenance import Form
from toque.sources.records import Turn

# Maximum number of characters that a template may write per character of the messages.
_MAX_GROWTH = 4
_MAX_ADDED = 1 << 16  # number of characters that a template may write in addition
_MAX_FIELD = 100  # maximum number of characters of a field's name in a message
_PLAIN = """\
{%- if bos_token is defined %}{{ bos_token }}{% endif %}
{%- for message in messages %}{{ '### ' + message['role'].title() + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"""
_CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' and eos_token != '<|im_end|>' %}{{ eos_token }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_PROBE = "Yes, chef!"  # an answer that shows how a template ends turns
TEMPLATES = {"plain": _PLAIN, "chatml": _CHATML}
"""Templates by name: Markdown headings, and OpenAI's ChatML."""
CLOCK = "strftime_now"
"""Function that templates call to read the clock, e.g. in Llama 3 and Granite."""
_MACRO_START = "{%- macro " + CLOCK + "(format) %}"
# Jinja removes a line break after a block. The empty text keeps the template's first line break.
_MACRO_END = "{%- endmacro %}{{ '' }}"
_DATED = re.compile(
    rf"\A{re.escape(_MACRO_START)}.*?{re.escape(_MACRO_END)}", re.DOTALL
)
_DIRECTIVE = re.compile(r"%[-_0^#:]*[A-Za-z]")
# Stand-in for "%%" while the directives are replaced, so that "%%d" becomes "%d"
_PERCENT = "<percent>"


@dataclass(frozen=True)
class Conversation:
    """Ids of a conversation, and the positions of its answers with their end tokens."""

    ids: NDArray[np.uint32]
    # Index of each answer's first id, and index after its last id.
    answers: list[Span]
    unended: int  # number of answers that the template does not end
    moved: int  # answers with a prompt that has other ids when it is encoded alone
    # Names of fields that the template does not write, once per message.
    unwritten: list[str]


class ChatTemplate:
    """Jinja template of a chat model, with its codec."""

    def __init__(self, template: str, codec: Codec) -> None:
        self._template = template
        self._codec = codec
        # The codec reads "<|im_end|>" as text. In the output of a template, it is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {
            number: token.content for number, token in added.items() if token.special
        }
        # End token of an answer, if the template does not write one.
        self._added_end: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started the child; a fork needs another child
        # The child renders one conversation at a time.
        self._thread = ThreadPoolExecutor(1, "chat template")

    def ids(self, turns: Sequence[Message]) -> Future[list[int]]:
        """Encode the prompt for an answer to the last turn.

        Raises:
            DataError: The template refuses the messages, or does not write one of their fields. It
                may omit the reasoning of earlier answers.
        """
        return self._thread.submit(self._encode_prompt, turns)

    def _encode_prompt(self, turns: Sequence[Message]) -> list[int]:
        return list(self._encode(self.prompt_text(turns)).ids)

    def prompt_text(self, turns: Sequence[Message]) -> str:
        """Render the prompt for an answer to the last turn; see `ids`."""
        answer = self._render(turns)
        name = self._codec.name
        if "text" not in answer:
            raise DataError(
                f"The chat template of {name} does not accept these messages: {answer['error']}."
            )
        writes_reasoning = any(field in self._template for field in REASONING_FIELDS)
        for _, field in answer["unwritten"]:
            if not (writes_reasoning and field in REASONING_FIELDS):
                raise DataError(
                    f"The chat template of {name} does not render the field {field[:_MAX_FIELD]!r} "
                    "of a message, so the model would never see it. Leave the field out."
                )
        text: str = answer["text"]
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids with the names of special tokens."""
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))

    def conversation(self, turns: Sequence[Turn], *, last: bool) -> Conversation | str:
        """Encode a conversation that ends with an answer.

        Some templates omit the reasoning of earlier answers. This is allowed if only the last
        answer has a loss. Some templates write special tokens and spaces only after the last turn.
        This is always allowed.

        Do not call this method and `ids` at the same time, because both use the same child.

        Args:
            turns: Turns of the conversation.
            last: Whether only the last answer has a loss.

        Returns:
            The conversation, or the template's reason for refusing it.

        Raises:
            DataError: The template writes an answer with a loss in another way when more turns
                follow.
        """
        messages = [
            {**turn.fields, "role": turn.role, "content": turn.text} for turn in turns
        ]
        learnt = [
            n
            for n, turn in enumerate(turns)
            if turn.role == "assistant" and turn.learnt
        ]
        if last:
            learnt = learnt[-1:]
        rendered = self._render(messages, answers=learnt)
        if "text" not in rendered:
            return f"the chat template refuses it: {rendered['error']}"
        return self._encode_answers(rendered)

    def _encode_answers(self, rendered: Mapping[str, Any]) -> Conversation:
        """Encode a rendered conversation, and find the ids of its answers."""
        text = rendered["text"]
        encoding = self._encode(text)
        ids = encoding.ids
        starts = [start for start, _ in encoding.offsets]
        answers: list[Span] = []
        unended = 0
        moved = 0
        turn_end: int | None = None
        for start, end in self._find_answers(rendered):
            first = bisect_left(starts, start)
            stop = bisect_left(starts, end)
            # To generate an answer, the prompt is encoded without the rest of the text.
            moved += self._encode(text[:start]).ids != ids[:first]
            turn_end = self._turn_end(encoding, text, first, stop)
            unended += turn_end is None
            answers.append((first, turn_end or stop))
        # The token that begins the next turn may end an answer. After the last answer, add it.
        if answers and turn_end is None and self._added_end is not None:
            first, stop = answers[-1]
            ids = [*ids[:stop], self._added_end]
            answers[-1] = (first, stop + 1)
            unended -= 1
        unwritten = [name for _, name in rendered["unwritten"]]
        return Conversation(
            np.array(ids, np.uint32), answers, unended, moved, unwritten
        )

    def _find_answers(self, rendered: Mapping[str, Any]) -> list[Span]:
        """Find the start and end of each answer in a rendered text."""
        text = rendered["text"]
        spans: list[Span] = []
        for start, shared_end, rest, n_messages in rendered["spans"]:
            end = shared_end
            if rest:
                end = self._end_without_marks(text[:shared_end] + rest, start)
            if not start <= end <= shared_end:
                raise DataError(
                    f"The chat template of {self._codec.name} writes the first {n_messages} "
                    "messages differently when more messages follow, so the loss cannot cover all "
                    "answers of a conversation. Set data.loss_on=last_answer to train only on the "
                    "last answer, or set data.chat_template to another template."
                )
            spans.append((start, end))
        return spans

    def _end_without_marks(self, text: str, start: int) -> int:
        """Find the end of a text without its last special tokens and spaces, at least `start`."""
        end = len(text)
        while end > start:
            stripped = text[start:end].rstrip()
            name = next((n for n in self._special.values() if stripped.endswith(n)), "")
            if not name and start + len(stripped) == end:
                break
            end = start + len(stripped) - len(name)
        return end

    def _turn_end(
        self, encoding: Encoding, text: str, first: int, stop: int
    ) -> int | None:
        """Find the index after the end token of an answer. None if the template writes no end.

        More special tokens may follow the end token, such as a line break and the end of the text.
        """
        ids = encoding.ids
        ends = self._codec.end_ids

        def is_mark(index: int) -> bool:
            """Check if a token is special, an end token or blank."""
            is_special = ids[index] in self._special or ids[index] in ends
            return is_special or not text[slice(*encoding.offsets[index])].strip()

        # First search the marks around the end of the text, then the answer itself.
        marks_start = stop
        marks_stop = stop
        while marks_start > first and is_mark(marks_start - 1):
            marks_start -= 1
        while marks_stop < len(ids) and is_mark(marks_stop):
            marks_stop += 1
        indices = list(range(marks_start, marks_stop))
        indices += reversed(range(first, stop))
        for index in indices:
            if ids[index] in ends:
                return index + 1
        return None

    def set_end_of_codec(self) -> None:
        """Make the codec end texts with the token that the template writes after an answer.

        Gemma's tokenizer ends texts with "<eos>", but its template ends turns with "<end_of_turn>".
        A model that waits for "<eos>" would never stop. GLM-4's template does not end answers. In
        this case, the end is the token that begins the next turn, if the model's files list it as
        an end token.
        """
        codec = self._codec
        question: Message = {"role": "user", "content": "?"}
        probe = [question, {"role": "assistant", "content": _PROBE}]
        tokens = self._tokens_after_probe(probe)
        end_ids = codec.end_ids
        end = next((t for t in tokens if t in self._special or t in end_ids), None)
        if end is None:
            following = self._tokens_after_probe([*probe, question])[:1]
            end = next((t for t in following if t in end_ids), None)
            self._added_end = end
        if end is not None and end != codec.eos_id:
            codec.set_end(end, is_eos_token="eos_token" not in self._template)

    def _tokens_after_probe(self, turns: Sequence[Message]) -> list[int]:
        """List the tokens that the template writes after the probe's answer. [] if it refuses."""
        text = self._render(turns, answers=[]).get("text", "")
        if _PROBE not in text:
            return []
        encoding = self._encode(text)
        end = text.rfind(_PROBE) + len(_PROBE)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [token for token, (start, _) in pairs if start >= end]

    def _encode(self, text: str) -> Encoding:
        with tokenizer_faults(self._codec.name):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _render(
        self, turns: Sequence[Message], answers: list[int] | None = None
    ) -> Json:
        """Render a conversation in the child. If it has failed, start another child.

        Return `_render_conversation`'s result, or the error from the template.
        """
        n_chars = sum(len(str(value)) for turn in turns for value in turn.values())
        request = {
            "conversations": [[dict(turn) for turn in turns]],
            "chat_template": self._template,
            **self._codec.special_tokens,
            "max_characters": _MAX_ADDED + _MAX_GROWTH * n_chars,
            "answers": answers,
        }
        child = self._ensure_child()
        to_child = cast("IO[bytes]", child.stdin)
        from_child = cast("IO[bytes]", child.stdout)
        try:
            to_child.write(json.dumps(request).encode() + b"\n")
            to_child.flush()
            answer: Json = json.loads(from_child.readline())
        except (OSError, ValueError):
            end_child(child)
            return {"error": f"it took more than {MAX_SECONDS:g} s, or crashed"}
        return answer

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        """Return the child of this process. If it has ended, start another child."""
        child = self._child
        if child is None or self._owner != os.getpid() or child.poll() is not None:
            child = start_child()
            self._child = child
            self._owner = os.getpid()
            weakref.finalize(self, end_child, child)
        return child


def find_template(name: str, settings: Mapping[str, Any]) -> str:
    """Find the template of `data.chat_template`.

    Args:
        name: "auto" for the tokenizer's template, a name in `TEMPLATES`, or Jinja code.
        settings: The tokenizer's settings.
    """
    if name == "auto":
        return template_text(settings) or TEMPLATES["plain"]
    return TEMPLATES.get(name, name)


def fix_date(template: str, day: str) -> str:
    """Replace the date that a template reads from the clock by a fixed date.

    The date becomes a part of the template, so that every program writes the same prompts.

    Args:
        template: The Jinja code.
        day: The ISO date.

    >>> fix_date("{{ strftime_now('%d %b %Y') }}", "2024-07-26").partition("{{ '' }}")[0]
    "{%- macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') | \
replace('%Y', '2024') }}{%- endmacro %}"
    """
    template = _DATED.sub("", template)
    if CLOCK not in template:
        return template
    moment = datetime.fromisoformat(day).replace(tzinfo=UTC)
    replacements = {
        form: moment.strftime(form) for form in _DIRECTIVE.findall(template)
    }
    if "%s" in replacements:  # strftime would use the machine's time zone
        replacements["%s"] = str(int(moment.timestamp()))
    if "%%" in template:
        replacements = {"%%": _PERCENT, **replacements, _PERCENT: "%"}
    filters = [f"replace({old!r}, {new!r})" for old, new in replacements.items()]
    date = " | ".join(["format", *filters])
    return _MACRO_START + "{{ " + date + " }}" + _MACRO_END + template


def prompt_ids(
    codec: Codec, text: str, family_kind: FamilyKind, form: Form, *, raw: bool = False
) -> list[int]:
    """Encode a prompt in the form of the training texts.

    If `raw` is set, the chat template is not used.
    """
    uses_template = form == "conversations" and not raw
    if uses_template and (template := chat_template_of(codec)) is not None:
        return template.ids([{"role": "user", "content": text}]).result()
    begin, end = generation_bounds(codec, family_kind, form)
    ids = codec.encode(codec.normalise(text))
    return [i for i in (begin, *ids, end) if i is not None]


@lru_cache(maxsize=4)  # few, because each template has a child process
def chat_template_of(codec: Codec) -> ChatTemplate | None:
    """Return the chat template of a codec's tokenizer or trained model."""
    text = template_text(codec.settings)
    return None if text is None else ChatTemplate(text, codec)


def template_text(settings: Mapping[str, Any]) -> str | None:
    """Find the chat template in a tokenizer's settings. Of several templates, use the default."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {
            t.get("name"): t.get("template") for t in template if isinstance(t, dict)
        }
        template = by_name.get("default")
    return template if isinstance(template, str) else None

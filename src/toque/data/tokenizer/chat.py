"""Chat templates, which turn conversations into the ids that a chat model was trained on.

A template may be untrusted. transformers renders it in the sandbox of jinja2 with access to the
turns and special tokens only, in a child process with limits on time, memory and output.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from toque.data.tokenizer.codec import Codec, FamilyKind, generation_bounds
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError
from toque.models.loading.provenance import Form
from toque.sources.records import Turn

# Maximum number of characters that a template may write per character of the messages.
_MAX_GROWTH = 4
_MAX_ADDED = 1 << 16  # number of characters that a template may write in addition
_MAX_SECONDS = 2.0  # seconds of processor time per rendering
# Maximum bytes of the child's address space. Its libraries take a fifth.
_MAX_MEMORY = 1 << 30
_READ_ERROR = 2000  # maximum number of characters of a template's error that are read
_MAX_ERROR = 300  # maximum number of characters of a template's error in a message
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
# Largest number of characters after an answer that depend on whether a turn follows.
_MAX_REST = 1 << 12
TEMPLATES = {"plain": _PLAIN, "chatml": _CHATML}
"""Templates by name: Markdown headings, and OpenAI's ChatML."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""Function that templates call to read the clock, e.g. in Llama 3 and Granite."""
_DATED = re.compile(
    rf"\A\{{%- macro {CLOCK}\(format\) %\}}.*?\{{%- endmacro %\}}\{{\{{ '' \}}\}}",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"%[-_0^#:]*[A-Za-z]")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for reasoning. transformers copies it to the first two."""
# Characters of a text that does not occur in a conversation by chance.
_MIN_UNIQUE = 20
Render = Callable[..., Any]
# `role`, `content`, and other fields that a template may write.
Message = Mapping[str, Any]
Field = tuple[int, str]  # index of a message, and name of a field
Span = tuple[int, int]  # start and stop of an answer
Json = dict[str, Any]


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
        answer = self._render(turns)
        name = self._codec.name
        if "text" not in answer:
            raise DataError(
                f"The chat template of {name} does not accept these messages: {answer['error']}."
            )
        writes_reasoning = any(field in self._template for field in _REASONING_FIELDS)
        for _, field in answer["unwritten"]:
            if not (writes_reasoning and field in _REASONING_FIELDS):
                raise DataError(
                    f"The chat template of {name} does not render the field {field[:_MAX_FIELD]!r} "
                    "of a message, so the model would never see it. Leave the field out."
                )
        return list(self._encode(answer["text"]).ids)

    def conversation(self, turns: Sequence[Turn], *, last: bool) -> Conversation | str:
        """Encode a conversation that ends with an answer.

        Some templates omit the reasoning of earlier answers. This is allowed if only the last
        answer has a loss. Some templates write special tokens and blanks only after the last turn.
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
            moved += self._encode(text[:start]).ids != ids[:first]
            turn_end = self._turn_end(encoding, text, first, stop)
            unended += turn_end is None
            answers.append((first, turn_end or stop))
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
        for start, same, rest, number in rendered["spans"]:
            end = self._end_without_marks(text[:same] + rest, start) if rest else same
            if not start <= end <= same:
                raise DataError(
                    f"The chat template of {self._codec.name} writes the first {number} messages "
                    "differently when more messages follow, so the loss cannot cover all answers "
                    "of a conversation. Set data.loss_on=last_answer to train only on the last "
                    "answer, or set data.chat_template to another template."
                )
            spans.append((start, end))
        return spans

    def _end_without_marks(self, text: str, start: int) -> int:
        """Find the end of a text without its last special tokens and blanks, at least `start`."""
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
        for index in range(marks_start, marks_stop):
            if ids[index] in ends:
                return index + 1
        for index in reversed(range(first, stop)):
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

        Return `_render_conversation`'s result, or the error of the template.
        """
        n_chars = sum(len(str(value)) for turn in turns for value in turn.values())
        request = {
            "conversations": [[dict(turn) for turn in turns]],
            "chat_template": self._template,
            **self._codec.special_tokens,
            "max_characters": _MAX_ADDED + _MAX_GROWTH * n_chars,
            "answers": answers,
        }
        child = self._child
        if child is None or self._owner != os.getpid() or child.poll() is not None:
            child = _start_child()
            self._child = child
            self._owner = os.getpid()
            weakref.finalize(self, _end_child, child)
        to_child = cast("IO[bytes]", child.stdin)
        from_child = cast("IO[bytes]", child.stdout)
        try:
            to_child.write(json.dumps(request).encode() + b"\n")
            to_child.flush()
            answer: Json = json.loads(from_child.readline())
        except (OSError, ValueError):
            _end_child(child)
            return {"error": f"it took more than {_MAX_SECONDS:g} s, or crashed"}
        return answer


def _start_child() -> subprocess.Popen[bytes]:
    """Start a child process. Of this process's environment, it gets only the module path."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "toque.data.tokenizer.chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        # A pipe is broken if the child did not read the entire request.
        with suppress(OSError):
            cast("IO[bytes]", pipe).close()


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
    steps = []
    for form in dict.fromkeys(_DIRECTIVE.findall(template)):
        value = moment.strftime(form)
        if form == "%s":  # strftime would use the machine's time zone
            value = str(int(moment.timestamp()))
        steps.append(f" | replace({form!r}, {value!r})")
    if "%%" in template:
        steps.append(" | replace('%%', '%')")
    macro = f"{{%- macro {CLOCK}(format) %}}{{{{ format{''.join(steps)} }}}}{{%- endmacro %}}"
    return f"{macro}{{{{ '' }}}}{template}"


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


def _render_conversation(
    render: Render, request: Json, answers: list[int] | None
) -> Json:
    """Render a conversation. Find its answers and the fields that are missing from the text.

    Args:
        render: The transformers function that renders a chat template.
        request: Arguments of `render`.
        answers: Indices of the turns to find. If None, render the prompt for the next answer.

    Returns:
        The text, the fields missing from it, and a span for each answer, see `_answer_span`.
    """
    turns = request.pop("conversations")[0]

    def text_of(messages: list[Json], *, for_answer: bool) -> str:
        random.seed(0)  # the same choices every time, if a template makes random ones
        arguments = {**request, "conversations": [messages]}
        return str(render(**arguments, add_generation_prompt=for_answer)[0][0])

    text = text_of(turns, for_answer=answers is None)
    unwritten = _unwritten_fields(
        turns, text, partial(text_of, for_answer=answers is None)
    )
    spans: list[tuple[int, int, str, int]] = []
    # Templates may mark answers by {% generation %}.
    if answers and _GENERATION.search(request["chat_template"]):
        random.seed(0)
        marked = render(
            conversations=[turns], **request, return_assistant_tokens_mask=True
        )
        marked_spans = cast("list[Span]", marked[1][0])
        for start, end in _marked_spans(turns, marked_spans, answers):
            spans.append((start, end, "", 0))
    else:
        for n in answers or ():
            prompt = text_of(turns[:n], for_answer=True)
            with_answer = text
            if n + 1 < len(turns):
                with_answer = text_of(turns[: n + 1], for_answer=False)
            spans.append((*_answer_span(text, prompt, with_answer), n + 1))
    return {"text": text, "unwritten": unwritten, "spans": spans}


def _answer_span(text: str, prompt: str, with_answer: str) -> tuple[int, int, str]:
    """Find an answer without marks: the text that the template adds to the prompt for it.

    Args:
        text: The text of the conversation.
        prompt: The text of the turns before the answer, with the start of an answer.
        with_answer: The text of the turns up to the answer.

    Returns:
        The start of the answer, the end of the part that `text` and `with_answer` share, and the
        rest of `with_answer`. An end of -1 means that the template writes the prompt in two ways.
    """
    shared_end = len(os.path.commonprefix([text, with_answer]))  # noqa: RUF071  # by character
    rest = with_answer[shared_end:]
    if not with_answer.startswith(prompt) or len(rest) > _MAX_REST:
        return len(prompt), -1, ""
    return len(prompt), shared_end, rest


def _marked_spans(
    turns: Sequence[Message], spans: list[Span], answers: list[int]
) -> list[Span]:
    """Select the spans of `answers` among the spans that a template marks."""
    all_answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if answers == all_answers:
        return spans
    if len(spans) == len(all_answers):
        pairs = zip(all_answers, spans, strict=True)
        return [span for n, span in pairs if n in answers]
    if answers == all_answers[-1:]:
        return spans[-1:]
    raise ValueError(
        f"it marks {len(spans)} parts in {len(all_answers)} answers, so the {len(answers)} answers "
        "to train on are unclear"
    )


def _unwritten_fields(
    turns: Sequence[Message], text: str, text_of: Callable[[list[Json]], str]
) -> list[Field]:
    """List the fields with a value that do not change the text of the turns."""

    def is_written(fields: list[Field]) -> bool:
        """Check if the text changes when these fields are removed."""
        try:
            return text_of(_remove_fields(turns, fields)) != text
        except Exception:  # the template needs the field  # noqa: BLE001
            return True

    fields = [
        (n, name)
        for n, turn in enumerate(turns)
        for name, value in turn.items()
        if name not in ("role", "content")
        and (not isinstance(value, str) or value.strip())
    ]
    if not fields or not is_written(fields):
        return fields
    unwritten: list[Field] = []
    for name in dict.fromkeys(name for _, name in fields):
        of_name = [field for field in fields if field[1] == name]
        if not is_written(of_name):
            unwritten += of_name
        elif len(of_name) > 1:
            # Check each field alone, except for values that need no rendering.
            surely_written = _surely_written(turns, of_name, text)
            others = [field for field in of_name if field not in surely_written]
            unwritten += [field for field in others if not is_written([field])]
    return unwritten


def _remove_fields(turns: Sequence[Message], fields: list[Field]) -> list[Json]:
    """Copy turns without some fields, and without other reasoning fields of equal values."""
    removed = set(fields)
    for n, name in fields:
        if name in _REASONING_FIELDS:
            value = turns[n][name]
            removed |= {(n, t) for t in _REASONING_FIELDS if turns[n].get(t) == value}
    return [
        {name: value for name, value in turn.items() if (n, name) not in removed}
        for n, turn in enumerate(turns)
    ]


def _surely_written(
    turns: Sequence[Message], fields: list[Field], text: str
) -> set[Field]:
    """List the fields with a long value that occurs in the text as often as in the fields."""
    values: dict[Field, str] = {}
    for n, name in fields:
        value = turns[n][name]
        if isinstance(value, str) and len(value.strip()) >= _MIN_UNIQUE:
            values[n, name] = value.strip()
    counts = Counter(values.values())
    return {
        field for field, value in values.items() if text.count(value) >= counts[value]
    }


def _render_requests() -> None:
    """Render templates in a child process: a line of JSON per request, and a line per answer.

    The process exits when its parent exits. The kernel enforces the limits, so a template cannot
    change them.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # halves the time to start
    # With some versions this import takes longer than a template may.
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit = request.pop("max_characters")
        # Without a handler, the signal ends the process immediately.
        signal.setitimer(signal.ITIMER_PROF, _MAX_SECONDS)
        try:
            answer = _render_conversation(
                render_jinja_template, request, request.pop("answers")
            )
            if (n := len(answer["text"])) > limit:
                raise ValueError(
                    f"it writes {n:,} characters, but the limit is {limit:,}"
                )
        except MemoryError:
            answer = {"error": "it needs more memory than a template may use"}
        except Exception as error:  # an untrusted template may raise any error  # noqa: BLE001
            words = str(error)[:_READ_ERROR].split()
            answer = {"error": " ".join(words)[:_MAX_ERROR].rstrip(".")}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _render_requests()

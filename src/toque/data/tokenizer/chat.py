"""Chat template: the turns of a conversation as the ids that a chat model was trained on.

The template may be anyone's: transformers renders it in jinja2's sandbox, where it reaches nothing
but the turns and the special tokens, in a child process of bounded time, memory and output.
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
from typing import IO, Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from toque.data.tokenizer.codec import Codec, FamilyKind, asking_bounds
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError
from toque.models.loading.provenance import Form
from toque.sources.records import Turn

_MOST_GROWTH: Final = 4
_MOST_ADDED: Final = 1 << 16  # characters it may write, and four times as many as the messages have
_SECONDS: Final = 2.0  # processor time of one template
_MOST_MEMORY: Final = 1 << 30  # address space of the child; its libraries take a fifth
_PLAIN: Final = """\
{%- if bos_token is defined %}{{ bos_token }}{% endif %}
{%- for message in messages %}{{ '### ' + message['role'].title() + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"""
_CHATML: Final = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' and eos_token != '<|im_end|>' %}{{ eos_token }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_PROBE: Final = "Yes, chef!"  # an answer by which a template shows how it ends turns
_MOST_REST: Final = 1 << 12  # characters behind an answer that a template may write in two ways
TEMPLATES: Final = {"plain": _PLAIN, "chatml": _CHATML}
"""Templates by name: headings as in Markdown; and the turns of OpenAI's ChatML."""
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK: Final = "strftime_now"
"""The function by which templates read the clock, as Llama 3's and Granite's do."""
_DATED: Final = re.compile(
    rf"\A\{{%- macro {CLOCK}\(format\) %\}}.*?\{{%- endmacro %\}}\{{\{{ '' \}}\}}", re.DOTALL
)
_DIRECTIVE: Final = re.compile(r"%[-_0^#:]*[A-Za-z]")
_TWINS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of one field: transformers fills the first two from any of them."""
_SURE: Final = 20  # characters of a text that no conversation holds by chance
Render = Callable[..., Any]  # transformers' rendering of conversations
Message = Mapping[str, Any]  # `role`, `content`, and other fields that a template may write


@dataclass(frozen=True)
class Conversation:
    """Ids of a whole conversation, and those of its answers, each with the token that ends it."""

    ids: NDArray[np.uint32]
    answers: list[tuple[int, int]]  # first id of each answer, and the place behind its last
    unended: int  # answers that the template does not end
    moved: int  # answers before which the prompt has other ids than alone, as it is asked with
    unwritten: list[str]  # names of fields that the template does not write, once per message


class ChatTemplate:
    """Conversations of one model, by its Jinja template."""

    def __init__(self, template: str, codec: Codec) -> None:
        self._template, self._codec = template, codec
        # The codec takes "<|im_end|>" in a text for text; what a template writes is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._end_behind: int | None = None  # end of an answer that the template does not write
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork has one of its own
        self._thread = ThreadPoolExecutor(1, "chat template")  # the child answers one at a time

    def ids(self, turns: Sequence[Message]) -> Future[list[int]]:
        """The prompt that asks to answer the last turn, or a DataError.

        A field that the template does not write is refused, except reasoning that it leaves out of
        history.
        """
        return self._thread.submit(self._ids, turns)

    def _ids(self, turns: Sequence[Message]) -> list[int]:
        answer = self._answer(self._asked(turns))
        name = self._codec.name
        if "text" not in answer:
            raise DataError(
                f"The chat template of {name} does not take these messages: {answer['error']}."
            )
        reasons = any(twin in self._template for twin in _TWINS)
        fields = [field for _, field in answer["unwritten"]]
        if unread := [field for field in fields if not (reasons and field in _TWINS)]:
            raise DataError(
                f"The chat template of {name} does not write the field {unread[0][:100]!r} of a "
                "message, so that the model would not read it. Leave the field out."
            )
        return list(self._encoded(answer["text"]).ids)

    def conversation(self, turns: Sequence[Turn], *, last: bool) -> Conversation | str:
        """A conversation that ends with an answer, or why the template does not take it.

        Where the `last` answer is all that is wanted, earlier ones may be written otherwise once
        they are history: some templates leave their reasoning out. Where all are, special tokens
        and blanks behind an answer may differ: some templates end the text only behind the last
        turn. Not beside `ids`, which waits for no thread of this process.

        Raises:
            DataError: an earlier answer is wanted, and the template writes it otherwise.
        """
        messages = [{**turn.fields, "role": turn.role, "content": turn.text} for turn in turns]
        learnt = [n for n, turn in enumerate(turns) if turn.role == "assistant" and turn.learnt]
        learnt = learnt[-1:] if last else learnt
        answer = self._answer(self._asked(messages) | {"answers": learnt})
        if "text" not in answer:
            return f"the chat template refuses it: {answer['error']}"
        text, spans = answer["text"], self._spans(answer)
        encoded = self._encoded(text)
        ids, begins = encoded.ids, [start for start, _ in encoded.offsets]
        found, unended, moved = list[tuple[int, int]](), 0, 0
        ended: int | None = None
        for start, end in spans:
            first, behind = bisect_left(begins, start), bisect_left(begins, end)
            before = self._encoded(text[:start]).ids
            moved += before != ids[:first]
            ended = self._behind_end(encoded, text, first, behind)
            unended += ended is None
            found.append((first, ended or behind))
        if found and ended is None and self._end_behind is not None:
            ids = [*ids[:behind], self._end_behind]
            found[-1] = (first, behind + 1)
            unended -= 1
        unwritten = [name for _, name in answer["unwritten"]]
        return Conversation(np.array(ids, np.uint32), found, unended, moved, unwritten)

    def _spans(self, answer: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Places of the answers in the text; DataError where an answer is written in two ways."""
        text, spans = answer["text"], list[tuple[int, int]]()
        for start, same, rest, number in answer["spans"]:
            end = self._without_marks(text[:same] + rest, start) if rest else same
            if not start <= end <= same:
                raise DataError(
                    f"The chat template of {self._codec.name} writes the beginning of a "
                    f"conversation otherwise once it goes on after message {number}, so that not "
                    "all of its answers can be learnt at once. data.loss_on=last_answer learns "
                    "only the last; data.chat_template names another template."
                )
            spans.append((start, end))
        return spans

    def _without_marks(self, text: str, start: int) -> int:
        """Length of a text without the special tokens and blanks at its end, at least `start`."""
        names, end = tuple(self._special.values()), len(text)
        while end > start:
            shorter = text[start:end].rstrip()
            name = next((name for name in names if shorter.endswith(name)), "")
            if not name and start + len(shorter) == end:
                break
            end = start + len(shorter) - len(name)
        return end

    def _behind_end(self, encoded: Encoding, text: str, first: int, behind: int) -> int | None:
        """Place behind the first end of an answer's turn; None where the template writes none.

        A template may write more behind it, such as a line break and an end of the text.
        """
        ids, ends = encoded.ids, self._codec.end_ids

        def is_mark(at: int) -> bool:
            special = ids[at] in self._special or ids[at] in ends
            return special or not text[slice(*encoded.offsets[at])].strip()

        begin, stop = behind, behind
        while begin > first and is_mark(begin - 1):
            begin -= 1
        while stop < len(ids) and is_mark(stop):
            stop += 1
        inside = [at for at in range(first, behind) if ids[at] in ends]
        marks = [at for at in range(begin, stop) if ids[at] in ends]
        return marks[0] + 1 if marks else inside[-1] + 1 if inside else None

    def end_as_written(self) -> None:
        """Let the codec end texts with the token that the template writes behind an answer.

        Gemma's tokenizer ends texts with "<eos>" and its template ends turns with "<end_of_turn>":
        a model that waits for the first would never stop. GLM-4's template writes no end: there
        the end is the token that begins the next turn, if the model's files name it as one.
        """
        codec = self._codec
        question: Message = {"role": "user", "content": "?"}
        probe = [question, {"role": "assistant", "content": _PROBE}]
        written = self._written_behind(probe)
        end = next((t for t in written if t in self._special or t in codec.end_ids), None)
        if end is None:
            following = self._written_behind([*probe, question])[:1]
            end = next((t for t in following if t in codec.end_ids), None)
            self._end_behind = end
        if end is not None and end != codec.eos_id:
            codec.end_with(end, is_eos_token="eos_token" not in self._template)

    def _written_behind(self, turns: Sequence[Message]) -> list[int]:
        """Tokens that the template writes behind the probe's answer; [] where it refuses it."""
        text = self._answer(self._asked(turns) | {"answers": []}).get("text", "")
        encoded, behind = self._encoded(text), text.rfind(_PROBE) + len(_PROBE)
        places = zip(encoded.ids, encoded.offsets, strict=True)
        return [token for token, (start, _) in places if start >= behind and _PROBE in text]

    def _encoded(self, text: str) -> Encoding:
        with tokenizer_faults(self._codec.name):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _asked(self, turns: Sequence[Message]) -> dict[str, object]:
        given = sum(len(str(value)) for turn in turns for value in turn.values())
        asked = {"conversations": [[dict(turn) for turn in turns]], "chat_template": self._template}
        most = {"most_characters": _MOST_ADDED + _MOST_GROWTH * given}
        return asked | self._codec.special_tokens | most

    def _answer(self, asked: Mapping[str, object]) -> dict[str, Any]:
        """Answer of the child; the next request gets another where this one had to be ended."""
        child = self._child
        if child is None or self._owner != os.getpid() or child.poll() is not None:
            child, self._owner = _started(), os.getpid()
            self._child = child
            weakref.finalize(self, _end, child)
        given, taken = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
        try:
            given.write(json.dumps(asked).encode() + b"\n")
            given.flush()
            answer: dict[str, Any] = json.loads(taken.readline())
        except (OSError, ValueError):
            _end(child)
            return {"error": f"it took more than {_SECONDS:g} s, or broke down"}
        return answer


def _started() -> subprocess.Popen[bytes]:
    """A child with nothing of this process but the places of its modules."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "toque.data.tokenizer.chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # what was not read yet cannot be sent any more
            cast("IO[bytes]", pipe).close()


def template_named(name: str, settings: Mapping[str, Any]) -> str:
    """The template that `data.chat_template` names: a tokenizer's own, a known one, or Jinja."""
    if name == "auto":
        return template_text(settings) or TEMPLATES["plain"]
    return TEMPLATES.get(name, name)


def dated(template: str, day: str) -> str:
    """The template with one day, an ISO date, wherever it reads the clock.

    The day becomes a part of the template, so that every program that asks the model writes it.

    >>> dated("{{ strftime_now('%d %b %Y') }}", "2024-07-26").partition("{{ '' }}")[0]
    "{%- macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') | \
replace('%Y', '2024') }}{%- endmacro %}"
    """
    template = _DATED.sub("", template)
    if CLOCK not in template:
        return template
    moment = datetime.fromisoformat(day).replace(tzinfo=UTC)
    seconds = {"%s": str(int(moment.timestamp()))}  # strftime would take the machine's time zone
    steps = [
        f" | replace({form!r}, {seconds.get(form) or moment.strftime(form)!r})"
        for form in dict.fromkeys(_DIRECTIVE.findall(template))
    ]
    if "%%" in template:
        steps.append(" | replace('%%', '%')")
    macro = f"{{%- macro {CLOCK}(format) %}}{{{{ format{''.join(steps)} }}}}{{%- endmacro %}}"
    return f"{macro}{{{{ '' }}}}{template}"


def prompt_ids(
    codec: Codec, text: str, family_kind: FamilyKind, form: Form, *, raw: bool = False
) -> list[int]:
    """A prompt encoded as in the store, for generating in the form the model was trained on.

    A `raw` one is a text, of which no template makes a question.
    """
    talks = form == "conversations" and not raw
    if talks and (template := chat_template_of(codec)) is not None:
        return template.ids([{"role": "user", "content": text}]).result()
    begin, end = asking_bounds(codec, family_kind, form)
    ids = codec.encode(codec.normalise(text))
    return [i for i in (begin, *ids, end) if i is not None]


@lru_cache(maxsize=4)  # codecs of models in use; a template has a process of its own
def chat_template_of(codec: Codec) -> ChatTemplate | None:
    """The template that came with a tokenizer, or that its model was trained with."""
    text = template_text(codec.settings)
    return None if text is None else ChatTemplate(text, codec)


def template_text(settings: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer's settings; of several, the one named default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _rendered(render: Render, asked: dict[str, Any], answers: list[int] | None) -> dict[str, Any]:
    """Text of a conversation, fields that it lacks, and the places of its `answers`, by message.

    A template marks answers itself, by {% generation %}. In others an answer is what it adds to the
    prompt that asks for it. Without `answers` the text is the prompt that asks for one. A place is
    the start of an answer, the end of what the text has of it, the rest that it has if it is the
    last, and the number of its message. The end is -1 if none fits.
    """
    turns, template = asked.pop("conversations")[0], asked["chat_template"]

    def text(messages: list[dict[str, Any]], *, asks: bool) -> str:
        random.seed(0)  # a template may choose at random: always the same
        given = {**asked, "conversations": [messages]}
        return str(render(**given, add_generation_prompt=asks)[0][0])

    whole = text(turns, asks=answers is None)
    unwritten = _unwritten(turns, whole, partial(text, asks=answers is None))
    if not answers:
        return {"text": whole, "unwritten": unwritten, "spans": []}
    spans = list[tuple[int, int, str, int]]()
    if _GENERATION.search(template):
        random.seed(0)
        marked = render(conversations=[turns], **asked, return_assistant_tokens_mask=True)
        parts = _marked(turns, cast("list[tuple[int, int]]", marked[1][0]), answers)
        spans = [(start, end, "", 0) for start, end in parts]
    else:
        for n in answers:
            before = text(turns[:n], asks=True)
            after = whole if n + 1 == len(turns) else text(turns[: n + 1], asks=False)
            pairs = enumerate(zip(whole, after, strict=False))
            same = next((at for at, (a, b) in pairs if a != b), min(len(whole), len(after)))
            rest = after[same:]
            if not after.startswith(before) or len(rest) > _MOST_REST:
                same, rest = -1, ""
            spans.append((len(before), same, rest, n + 1))
    return {"text": whole, "unwritten": unwritten, "spans": spans}


def _marked(
    turns: Sequence[Message], spans: list[tuple[int, int]], answers: list[int]
) -> list[tuple[int, int]]:
    """The spans of these answers among all that a template marks."""
    every = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if answers == every:
        return spans
    if len(spans) == len(every):
        return [span for n, span in zip(every, spans, strict=True) if n in answers]
    if answers == every[-1:]:
        return spans[-1:]
    raise ValueError(
        f"it marks {len(spans)} parts of {len(every)} answers, and {len(answers)} are to be learnt"
    )


def _unwritten(
    turns: Sequence[Message], whole: str, text: Callable[[list[dict[str, Any]]], str]
) -> list[tuple[int, str]]:
    """Filled fields of messages, by message and name, without which the text is the same."""
    places = [
        (n, name)
        for n, turn in enumerate(turns)
        for name, value in turn.items()
        if name not in ("role", "content") and (not isinstance(value, str) or value.strip())
    ]

    def is_written(some: list[tuple[int, str]]) -> bool:
        """True if the text is another without these fields and their twins of equal value."""
        gone = set(some)
        gone |= {(n, twin) for n, name in some if name in _TWINS for twin in _TWINS
                 if turns[n].get(twin) == turns[n][name]}  # fmt: skip
        bare = [
            {name: value for name, value in turn.items() if (n, name) not in gone}
            for n, turn in enumerate(turns)
        ]
        try:
            return text(bare) != whole
        except Exception:  # the template needs it  # noqa: BLE001
            return True

    if not places or not is_written(places):
        return places
    found = list[tuple[int, str]]()
    for name in dict.fromkeys(name for _, name in places):
        of_name = [place for place in places if place[1] == name]
        if not is_written(of_name):
            found += of_name
            continue
        values = {n: turns[n][name] for n, _ in of_name}
        # A long text that is there as often as messages have it needs no text without it.
        texts = Counter(value.strip() for value in values.values() if isinstance(value, str))
        sure = {one for one, n in texts.items() if len(one) >= _SURE and whole.count(one) >= n}
        unsure = [
            (n, name)
            for n, value in values.items()
            if not (isinstance(value, str) and value.strip() in sure)
        ]
        if len(of_name) > 1:
            found += [place for place in unsure if not is_written([place])]
    return found


def _render_requests() -> None:
    """Render templates in a child process: a JSON request a line, answered with one each.

    It ends with the process that started it. Its limits are the kernel's, which no template lifts.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # half of the time to start
    # Before a template's time begins: with some versions it takes more than all of that.
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        most = asked.pop("most_characters")
        # The signal has no handler: its default ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        try:
            answer = _rendered(render_jinja_template, asked, asked.pop("answers", None))
            if (n := len(answer.get("text", ""))) > most:
                raise ValueError(f"it writes {n:,} characters, and {most:,} are allowed")
        except MemoryError:
            answer = {"error": "it asks for more memory than a template may have"}
        except Exception as error:  # whatever a stranger's template does  # noqa: BLE001
            answer = {"error": " ".join(str(error)[:2000].split())[:300].rstrip(".")}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _render_requests()

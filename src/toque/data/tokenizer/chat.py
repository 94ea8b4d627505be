"""Chat template: the turns of a conversation as the ids that a chat model was trained on.

The template may be anyone's: transformers renders it in jinja2's sandbox, where it reaches nothing
but the turns and the special tokens, in a child process of bounded time, memory and output.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from toque.data.tokenizer.codec import Codec, FamilyKind, asking_bounds
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError
from toque.models.loading.provenance import Form

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
TEMPLATES: Final = {"plain": _PLAIN, "chatml": _CHATML}
"""Templates by name: headings as in Markdown; and the turns of OpenAI's ChatML."""
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
Turns = Sequence[tuple[str, str]]  # role and text of each message
Render = Callable[..., Any]  # transformers' rendering of conversations


@dataclass(frozen=True)
class Conversation:
    """Ids of a whole conversation, and those of its answers, each with the token that ends it."""

    ids: NDArray[np.uint32]
    answers: list[tuple[int, int]]  # first id of each answer, and the place behind its last
    unended: int  # answers that the template does not end
    moved: int  # answers before which the prompt has other ids than alone, as it is asked with


class ChatTemplate:
    """Conversations of one model, by its Jinja template."""

    def __init__(self, template: str, codec: Codec) -> None:
        self._template, self._codec = template, codec
        # The codec takes "<|im_end|>" in a text for text; what a template writes is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork has one of its own
        self._thread = ThreadPoolExecutor(1, "chat template")  # the child answers one at a time

    def ids(self, turns: Sequence[Mapping[str, str]]) -> Future[list[int]]:
        """The prompt that asks to answer the last turn (`role`, `content`), or a DataError."""
        return self._thread.submit(self._ids, turns)

    def _ids(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        answer = self._answer(self._asked(turns))
        if "text" not in answer:
            name, why = self._codec.name, answer["error"]
            raise DataError(f"The chat template of {name} does not take these messages: {why}.")
        return list(self._encoded(answer["text"]).ids)

    def conversation(self, turns: Turns, *, last: bool) -> Conversation | str:
        """A conversation that ends with an answer, or why the template does not take it.

        Where the `last` answer is all that is wanted, earlier ones may be written otherwise once
        they are history: some templates leave their reasoning out. Not beside `ids`, which waits
        for no thread of this process.

        Raises:
            DataError: an earlier answer is wanted, and the template writes it otherwise.
        """
        given = [{"role": role, "content": text} for role, text in turns]
        answer = self._answer(self._asked(given) | {"answers": "last" if last else "all"})
        if "rewrites" in answer:
            raise DataError(
                f"The chat template of {self._codec.name} writes the beginning of a conversation "
                f"otherwise once it goes on after message {answer['rewrites']}, so that not all of "
                "its answers can be learnt at once. data.loss_on=last_answer learns only the last; "
                "data.chat_template names another template."
            )
        if "text" not in answer:
            return f"the chat template refuses it: {answer['error']}"
        encoded = self._encoded(answer["text"])
        ids, begins = np.array(encoded.ids, np.uint32), [start for start, _ in encoded.offsets]
        found, unended, moved = list[tuple[int, int]](), 0, 0
        for start, end in answer["spans"]:
            first, behind = bisect_left(begins, start), bisect_left(begins, end)
            before = self._encoded(answer["text"][:start]).ids
            moved += before != encoded.ids[:first]
            # What a template writes behind the end of an answer, a line break say, is not learnt.
            written = enumerate(encoded.ids[first : behind + 1], first)
            ends = [at for at, token in written if token == self._codec.eos_id]
            unended += not ends
            found.append((first, ends[-1] + 1 if ends else behind))
        return Conversation(ids, found, unended, moved)

    def end_as_written(self) -> None:
        """Let the codec end texts with the token that the template writes behind an answer.

        Gemma's tokenizer ends texts with "<eos>" and its template ends turns with "<end_of_turn>":
        a model that waits for the first would never stop. Templates that write the tokenizer's own
        end, or no token of their own, change nothing.
        """
        end = self._codec.piece(self._codec.eos_id)
        if "eos_token" in self._template or end in self._template:
            return
        found = self.conversation([("user", "?"), ("assistant", "!")], last=True)
        if isinstance(found, str):
            return
        first, behind = found.answers[-1]
        added = self._tokenizer.get_added_tokens_decoder()
        ends = [t for t in found.ids[first:behind].tolist() if t in added and added[t].special]
        if ends:
            self._codec.end_with(ends[-1])

    def _encoded(self, text: str) -> Encoding:
        with tokenizer_faults(self._codec.name):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _asked(self, turns: Sequence[Mapping[str, str]]) -> dict[str, object]:
        given = sum(len(text) for turn in turns for text in turn.values())
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


def _rendered(render: Render, asked: dict[str, Any], answers: str) -> dict[str, Any]:
    """Text of a conversation; with `answers`, "all" or the "last", places of theirs in it.

    A template marks them itself, by {% generation %}. In others an answer is what it adds to the
    prompt that asks for it.
    """
    turns, template = asked.pop("conversations")[0], asked["chat_template"]

    def text(n: int, *, asks: bool) -> str:
        given = {**asked, "conversations": [turns[:n]]}
        return str(render(**given, add_generation_prompt=asks)[0][0])

    if not answers:
        return {"text": text(len(turns), asks=True)}
    whole, spans = text(len(turns), asks=False), list[tuple[int, int]]()
    if _GENERATION.search(template):
        marked = render(conversations=[turns], **asked, return_assistant_tokens_mask=True)
        spans = cast("list[tuple[int, int]]", marked[1][0])
    else:
        for n, turn in enumerate(turns):
            if turn["role"] != "assistant" or (answers == "last" and n + 1 < len(turns)):
                continue
            before = text(n, asks=True)
            after = whole if n + 1 == len(turns) else text(n + 1, asks=False)
            if not (whole.startswith(after) and after.startswith(before)):
                return {"error": "", "rewrites": n + 1}
            spans.append((len(before), len(after)))
    return {"text": whole, "spans": spans[-1:] if answers == "last" else spans}


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
            answer = _rendered(render_jinja_template, asked, asked.pop("answers", ""))
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

"""Child process that renders chat templates, because a template may be untrusted.

The kernel limits the time and memory of the process. transformers renders the template in the
sandbox of jinja2.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, cast

MAX_SECONDS = 2.0  # seconds of processor time per rendering
# Maximum bytes of the child's address space. Its libraries take a fifth.
_MAX_MEMORY = 1 << 30
_READ_ERROR = 2000  # maximum number of characters of a template's error that are read
_MAX_ERROR = 300  # maximum number of characters of a template's error in a message
# Largest number of characters after an answer that depend on whether a turn follows.
_MAX_REST = 1 << 12
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for reasoning. transformers copies it to the first two."""
# Characters of a text that does not occur in a conversation by chance.
_MIN_UNIQUE = 20
# `role`, `content`, and other fields that a template may write.
Message = Mapping[str, Any]
Field = tuple[int, str]  # index of a message, and name of a field
Span = tuple[int, int]  # start and stop of an answer
Json = dict[str, Any]


def start_child() -> subprocess.Popen[bytes]:
    """Start a child process. Of this process's environment, it gets only the module path."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "toque.data.tokenizer.template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child process, and close its pipes."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        # A pipe is broken if the child did not read the entire request.
        with suppress(OSError):
            cast("IO[bytes]", pipe).close()


def _render_conversation(
    render: Callable[..., Any], request: Json, answers: list[int] | None
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

    render_turns = partial(text_of, for_answer=answers is None)
    text = render_turns(turns)
    unwritten = _unwritten_fields(turns, text, render_turns)
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
        if name in REASONING_FIELDS:
            value = turns[n][name]
            removed |= {(n, t) for t in REASONING_FIELDS if turns[n].get(t) == value}
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
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
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

"""Chat template: the turns of a conversation as the ids that a chat model was trained on.

The template may be anyone's: transformers renders it in jinja2's sandbox, where it reaches nothing
but the turns and the special tokens, in a child process of bounded time, memory and output.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final, cast

from tokenizers import Tokenizer

from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError

_MOST_GROWTH: Final = 4
_MOST_ADDED: Final = 1 << 16  # characters it may write, and four times as many as the messages have
_SECONDS: Final = 2.0  # processor time of one template
_MOST_MEMORY: Final = 1 << 30  # address space of the child; its libraries take a fifth


class ChatTemplate:
    """Conversations of one model, by its Jinja template."""

    def __init__(self, template: str, codec: Codec) -> None:
        self._template, self._codec = template, codec
        # The codec takes "<|im_end|>" in a text for text; what a template writes is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "chat template")  # the child answers one at a time

    def ids(self, turns: Sequence[Mapping[str, str]]) -> Future[list[int]]:
        """The prompt that asks to answer the last turn (`role`, `content`), or a DataError."""
        return self._thread.submit(self._ids, turns)

    def _ids(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        asked = {"conversations": [[dict(turn) for turn in turns]], "chat_template": self._template}
        given = sum(len(text) for turn in turns for text in turn.values())
        most = _MOST_ADDED + _MOST_GROWTH * given
        answer = self._answer(asked | self._codec.special_tokens | {"most_characters": most})
        if "text" not in answer:
            name, why = self._codec.name, answer["error"]
            raise DataError(f"The chat template of {name} does not take these messages: {why}.")
        with tokenizer_faults(self._codec.name):
            return list(self._tokenizer.encode(answer["text"], add_special_tokens=False).ids)

    def _answer(self, asked: Mapping[str, object]) -> dict[str, str]:
        """Answer of the child; the next request gets another where this one had to be ended."""
        child = self._child
        if child is None or child.poll() is not None:
            child = self._child = _started()
            weakref.finalize(self, _end, child)
        given, taken = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
        try:
            given.write(json.dumps(asked).encode() + b"\n")
            given.flush()
            answer: dict[str, str] = json.loads(taken.readline())
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


def chat_template_of(codec: Codec) -> ChatTemplate | None:
    """The template that came with a tokenizer."""
    text = template_text(codec.settings)
    return None if text is None else ChatTemplate(text, codec)


def template_text(settings: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer's settings; of several, the one named default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _render_requests() -> None:
    """Render templates in a child process: a JSON request a line, answered with one each.

    It ends with the process that started it. Its limits are the kernel's, which no template lifts.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # half of the time to start
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        most = asked.pop("most_characters")
        # The signal has no handler: its default ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        try:
            text = str(render_jinja_template(**asked, add_generation_prompt=True)[0][0])
            if len(text) > most:
                raise ValueError(f"it writes {len(text):,} characters, and {most:,} are allowed")
            answer = {"text": text}
        except MemoryError:
            answer = {"error": "it asks for more memory than a template may have"}
        except Exception as error:  # whatever a stranger's template does  # noqa: BLE001
            answer = {"error": " ".join(str(error)[:2000].split())[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _render_requests()

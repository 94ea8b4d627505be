"""Chat template: the turns of a conversation as the ids that a chat model was trained on.

The template comes with the model and may be anyone's: transformers renders it in jinja2's sandbox,
where it reaches nothing but the turns and the special tokens, in a child process whose time, memory
and output are bounded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final, cast

from tokenizers import Tokenizer

from toque.data.tokenizer import template_child
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_folder import tokenizer_faults
from toque.errors import DataError

_MOST_GROWTH: Final = 4
_MOST_ADDED: Final = 1 << 16
"""Characters that a template may write, besides four times as many as the messages hold."""


class ChatTemplate:
    """Conversations of one model.

    Args:
        template: Jinja, as transformers takes it.
        codec: of the model.
    """

    def __init__(self, template: str, codec: Codec) -> None:
        self._template, self._codec = template, codec
        # The codec takes "<|im_end|>" in a text for text; what a template writes is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "chat template")  # the child answers one at a time

    def ids(self, turns: Sequence[Mapping[str, str]]) -> Future[list[int]]:
        """The prompt after which the model answers the last turn, made in a thread of its own.

        Args:
            turns: each with its `role` and `content`.

        Raises:
            DataError: as the result; the template refuses them, or fails.
        """
        return self._thread.submit(self._ids, turns)

    def _ids(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        asked = {"conversations": [[dict(turn) for turn in turns]], "chat_template": self._template}
        given = sum(len(text) for turn in turns for text in turn.values())
        most = _MOST_ADDED + _MOST_GROWTH * given
        answer = self._answer(asked | self._codec.special_tokens | {"most_characters": most})
        if "text" not in answer:
            raise DataError(
                f"The chat template of {self._codec.name} does not take these messages: "
                f"{answer['error']}."
            )
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
            return {"error": f"it took more than {template_child.SECONDS:g} s, or broke down"}
        return answer


def _started() -> subprocess.Popen[bytes]:
    """A child with nothing of this process but the places of its modules."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", template_child.__name__],
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

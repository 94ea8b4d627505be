"""Child process that renders a stranger's chat template, with little memory and time to do it.

It reads one JSON request a line and answers each with one; it ends with the process that started
it. The limits are the kernel's, which no template can lift: what takes the time ends the process,
and what asks for the memory gets a MemoryError.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Final

SECONDS: Final = 2.0
"""Processor time of one template."""
_MOST_MEMORY: Final = 1 << 30
"""Address space, libraries included, which take a fifth of it."""


def main() -> None:
    """Answer requests until the last."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # half of the time to start
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        most = asked.pop("most_characters")
        # The signal has no handler: its default ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
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
    main()

"""Text augmentation by rules: formats, instructions, verbs, ingredients, tips.

The rules read only the words of an example and a 64-bit key, so the augmented example is a function
of (seed, epoch, example). Only requests for a whole recipe are changed: the labels of the other
tasks hold for the original text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from toque.cooking.augmentation.paraphrases import CONNECTIONS, TIPS, VERBS
from toque.cooking.augmentation.substitutions import substitution
from toque.cooking.prompts import ASKS_FOR, PROMPT_FORMATS, WITH_INGREDIENTS
from toque.data.tokenizer.word_edits import BREAK, Edit
from toque.keyed_random import key_of

_FORMAT, _CONNECTION, _PARAPHRASE, _SUBSTITUTE, _TIP = range(5)
_ASKS: Final = ASKS_FOR.split()
_WITH: Final = WITH_INGREDIENTS.split()
_FORMATS: Final = (
    tuple(_ASKS),
    *(tuple(form.partition("{text}")[0].split()) for form in PROMPT_FORMATS),
)
_TARGET_BEGINS: Final = "Ingredients:"
_STEPS_BEGIN: Final = "Instructions:"

Edits = list[Edit]


@dataclass(frozen=True)
class Augmentation:
    """How often each technique is applied: probabilities per example and epoch."""

    prompt_formats: bool = False
    """One of the eight wordings for every example, all equally likely."""
    instructions: float = 0.0
    paraphrase: float = 0.0
    substitute: float = 0.0
    tips: float = 0.0

    def edits(
        self, prompt: Sequence[str], target: Sequence[str], *, key: int, whole: bool
    ) -> tuple[Edits, Edits]:
        """The edits of each side.

        Args:
            prompt: its words.
            target: its words.
            key: seeds every draw.
            whole: whether the target reaches the true end of its text.
        """
        if not target or target[0] != _TARGET_BEGINS:
            return [], []
        asked, written = self._prompt(prompt, key), []
        if self._drawn(key, _SUBSTITUTE, self.substitute) and (at := _names_at(prompt)):
            found = substitution(prompt, target, names_at=at, key=key_of(key, _SUBSTITUTE, 1))
            asked += found[0]
            written += found[1]
        if self._drawn(key, _PARAPHRASE, self.paraphrase):
            written += _paraphrased(target, key)
        if whole and self._drawn(key, _TIP, self.tips):
            tip = TIPS[key_of(key, _TIP, 1) % len(TIPS)]
            written.append(Edit(len(target), len(target), (BREAK, "Tip:", *tip.split())))
        return sorted(asked), _apart(written)

    def _prompt(self, prompt: Sequence[str], key: int) -> Edits:
        if list(prompt[: len(_ASKS)]) != _ASKS:
            return []
        edits: Edits = []
        if self.prompt_formats:
            form = _FORMATS[key_of(key, _FORMAT) % len(_FORMATS)]
            if form != _FORMATS[0]:
                edits.append(Edit(0, len(_ASKS), form))
        at = _names_at(prompt)
        if at and self._drawn(key, _CONNECTION, self.instructions):
            words = CONNECTIONS[key_of(key, _CONNECTION, 1) % len(CONNECTIONS)]
            edits.append(Edit(at - len(_WITH), at, tuple(words.split())))
        return edits

    def _drawn(self, key: int, technique: int, probability: float) -> bool:
        return key_of(key, technique, 2) / 2.0**64 < probability


def _names_at(prompt: Sequence[str]) -> int | None:
    """Index of the first ingredient name; None if the prompt lists none."""
    for at in range(len(prompt) - len(_WITH)):
        if list(prompt[at : at + len(_WITH)]) == _WITH:
            return at + len(_WITH)
    return None


def _paraphrased(target: Sequence[str], key: int) -> Edits:
    """Replace verbs that begin a sentence of the steps; keeping the verb is one of the choices."""
    edits: Edits = []
    if _STEPS_BEGIN not in target:
        return edits
    for at in range(target.index(_STEPS_BEGIN) + 1, len(target)):
        others = VERBS.get(target[at])
        if others is None or not target[at - 1].endswith("."):
            continue
        choice = key_of(key, _PARAPHRASE, 3, at) % (len(others) + 1)
        if choice:
            edits.append(Edit(at, at + 1, tuple(others[choice - 1].split())))
    return edits


def _apart(edits: Edits) -> Edits:
    """The edits in order, without those that overlap an earlier one."""
    kept: Edits = []
    for edit in sorted(edits):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept

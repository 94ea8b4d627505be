"""Settings that earlier versions had, and what takes their place: the text of their refusal.

A row names a setting or a whole section, `"train.x"`, or one value of a setting that stays,
`"train.x=value"`. Its sentences say why it went and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

GONE: Mapping[str, str] = {
    "observe.system=true": (
        'the time between two looks is a setting. Give "10 seconds", which true meant.'
    ),
    "train.optimisations.attention=flash": (
        "every model attends by FlexAttention on a GPU. Remove it, or say flex."
    ),
}
"""Sentences by dotted name; indices of lists are left out (`data.sources.path`)."""

"""Typical ratios of speeds, for estimates without a measurement."""

from __future__ import annotations

from typing import Final

GENERATION_SHARE: Final = 0.25
"""Ratio of generation speed to training speed, in tokens per second. A guess
(lab/performance.md, "Threads that wait")."""

"""Verdict on a run, from its files alone: shares of the wall time, what limits it, the lever."""

from toque.reports.verdict.finding import Finding
from toque.reports.verdict.shares import Share
from toque.reports.verdict.verdict import Verdict, advice, verdict_of

__all__ = ["Finding", "Share", "Verdict", "advice", "verdict_of"]

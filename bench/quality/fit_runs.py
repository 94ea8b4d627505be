"""Fits of the short runs: held-out bits a byte by parameters and text, and the best rate by width.

    python bench/quality/fit_runs.py --runs lab/tonight/runs.jsonl

The form is that of Hoffmann et al. 2022, equation 10: L(N, D) = E + A / N^a + B / D^b, N parameters
without embeddings, D bytes of text that were read. a and b are searched on a grid, E, A and B are
least squares of the relative error. Every run is then left out once and foreseen by the others: the
worst of these errors is the fit's own. Runs at a rate or batch that was not the best of its size
are no part of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

EXPONENTS = np.arange(0.05, 1.01, 0.025)


class Point(NamedTuple):
    """One run: its size, its text, and what it reached."""

    parameters: float
    text_bytes: float
    bits_per_byte: float


class Fit(NamedTuple):
    """The numbers of L(N, D)."""

    floor: float
    of_size: float
    size_exponent: float
    of_text: float
    text_exponent: float

    def __call__(self, parameters: float, text_bytes: float) -> float:
        """Held-out bits a byte."""
        size = self.of_size / parameters**self.size_exponent
        return self.floor + size + self.of_text / text_bytes**self.text_exponent


def fitted(points: list[Point]) -> Fit:
    """The fit with the least sum of squared relative errors; no part of it is negative."""
    n, d, y = (np.array(column) for column in zip(*points, strict=True))
    best: tuple[float, Fit] | None = None
    for a in EXPONENTS:
        for b in EXPONENTS:
            columns = np.stack([np.ones_like(y), n**-a, d**-b], axis=1)
            found, *_ = np.linalg.lstsq(columns / y[:, None], np.ones_like(y), rcond=None)
            error = float((((columns @ found) / y - 1) ** 2).sum())
            if (found >= 0).all() and (best is None or error < best[0]):
                best = error, Fit(found[0], found[1], float(a), found[2], float(b))
    if best is None:
        raise harness.Skipped("no fit without a negative part: more runs are needed")
    return best[1]


def left_out(points: list[Point]) -> list[float]:
    """The relative error of each run as the others foresee it."""
    others = [points[:at] + points[at + 1 :] for at in range(len(points))]
    return [
        fitted(rest)(point.parameters, point.text_bytes) / point.bits_per_byte - 1
        for rest, point in zip(others, points, strict=True)
    ]


def of_line(line: dict[str, Any]) -> Point:
    """A run as a point; its bytes of text follow from its loss in nats a token and bits a byte."""
    found = line["found"]
    bytes_per_token = found["loss"] / math.log(2) / found["bits_per_byte"]
    tokens = line["run"]["tokens"]
    parameters = found["parameters"]["non_embedding"]
    return Point(parameters, tokens * bytes_per_token, found["bits_per_byte"])


def measure(a: argparse.Namespace) -> harness.Result:
    """The best settings of each size and length, and the fit through them."""
    lines = [json.loads(line) for line in a.runs.read_text().splitlines()]
    lines = [line for line in lines if line["run"]["data"] == a.data]
    groups = defaultdict(list)
    for line in lines:
        run = line["run"]
        groups[run["width"], run["layers"], run["tokens"], run["vocabulary"]].append(line)
    rows = [
        {
            "run": {name: line["run"][name] for name in ("optimizer", "peak_lr", "batch")},
            "width": width,
            "tokens": tokens,
            "vocabulary": vocabulary,
            "bits_per_byte": round(line["found"]["bits_per_byte"], 4),
        }
        for (width, _, tokens, vocabulary), group in sorted(groups.items())
        for line in sorted(group, key=lambda one: one["found"]["bits_per_byte"])
    ]
    best = [
        min(group, key=lambda one: one["found"]["bits_per_byte"])
        for key, group in groups.items()
        if key[3] == a.vocabulary
    ]
    points = [of_line(line) for line in best]
    if len(points) < 8:
        return harness.Result(ours={"runs": rows}, quality={"passes": None})
    fit, errors = fitted(points), left_out(points)
    worst = max(abs(error) for error in errors)
    return harness.Result(
        ours={"fit": fit._asdict(), "worst_error": worst, "runs": rows},
        quality={"passes": worst < 0.03, "compared": "each run as the others foresee it"},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--runs", type=Path, required=True)
    p.add_argument("--data", default="two magazines and a site")
    p.add_argument("--vocabulary", type=int, default=2048)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)

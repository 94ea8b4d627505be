"""Fits of the short runs: held-out bits a byte by parameters and text, and the best rate by width.

    python bench/quality/fit_runs.py --runs lab/tonight/runs.jsonl

The form is that of `toque.workflows.first_config.dial.Fit`, E + A / N^a + B / D^b, N parameters
without embeddings, D bytes of text that were read. E is what the options say, for runs of an hour
cannot tell it; a and b are searched on a grid, A and B are least squares of the relative error.
Every run is then left out once and foreseen by the others: the worst of these errors is the fit's
own. Runs at a rate or batch that was not the best of its size are no part of it, nor those of fewer
than four million tokens, in which a model hardly copies what the prompt lists and the loss falls by
another law. Another collection has the same form times a number of its own; where it was read more
than once, the runs also tell what a repeat is worth.
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

from toque.workflows.first_config.dial import VOCABULARY, Fit

EXPONENTS = np.arange(0.05, 1.01, 0.025)
KEYS = ("width", "layers", "tokens", "vocabulary", "family")  # of runs that differ in their rates
FEWEST = 4  # runs that a fit needs
REPEATS = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
VARIED = {"label_smoothing", "more"}  # settings that a usual run does not have
DECAY = "weight_decay"  # without it few texts are learnt by heart, whatever a repeat is worth


class Point(NamedTuple):
    """One run: its size, its text, and what it reached."""

    parameters: float
    text_bytes: float
    bits_per_byte: float
    text: float = math.inf
    """Bytes of the collection; more were read where it was read again."""


def fitted(points: list[Point], floor: float) -> Fit:
    """The fit with the least sum of squared relative errors; no part of it is negative."""
    n, d, y, _ = (np.array(column) for column in zip(*points, strict=True))
    best: tuple[float, Fit] | None = None
    for a in EXPONENTS:
        for b in EXPONENTS:
            columns = np.stack([n**-a, d**-b], axis=1) / y[:, None]
            found, *_ = np.linalg.lstsq(columns, 1.0 - floor / y, rcond=None)
            error = float(((columns @ found + floor / y - 1.0) ** 2).sum())
            if (found >= 0).all() and (best is None or error < best[0]):
                size, text = map(float, found)
                best = error, Fit(floor, size, float(a), text, float(b), math.inf)
    if best is None:
        raise harness.Skipped("no fit without a negative part: more runs are needed")
    return best[1]


def left_out(points: list[Point], floor: float) -> list[float]:
    """The relative error of each run as the others foresee it."""
    others = [points[:at] + points[at + 1 :] for at in range(len(points))]
    return [
        fitted(rest, floor).bits_per_byte(*point[:2]) / point.bits_per_byte - 1
        for rest, point in zip(others, points, strict=True)
    ]


def scaled(fit: Fit, points: list[Point]) -> dict[str, float]:
    """The number that another collection's bits are times those of the fit, and its repeats."""
    best: tuple[float, float, float] | None = None
    for repeats in REPEATS:
        own = fit._replace(repeats=repeats)
        expected = np.array(
            [
                own.bits_per_byte(point.parameters, own.fresh(point.text_bytes, point.text))
                for point in points
            ]
        )
        found = np.array([point.bits_per_byte for point in points])
        factor = float((found / expected).mean())
        error = float(np.abs(factor * expected / found - 1).max())
        if best is None or error < best[0]:
            best = error, factor, repeats
    assert best is not None
    return dict(zip(("worst_error", "factor", "repeats"), best, strict=True))


def of_line(line: dict[str, Any]) -> Point:
    """A run as a point; its bytes of text follow from its loss in nats a token and bits a byte."""
    found = line["found"]
    bytes_per_token = found["loss"] / math.log(2) / found["bits_per_byte"]
    tokens = line["run"]["tokens"]
    parameters, read = found["parameters"]["non_embedding"], tokens * bytes_per_token
    return Point(parameters, read, found["bits_per_byte"], read / found["epochs"])


def measure(a: argparse.Namespace) -> harness.Result:
    """The best settings of each size and length, and the fit through them."""
    lines = [json.loads(line) for line in a.runs.read_text().splitlines()]
    lines = [line for line in lines if "start" not in line["run"]]  # from scratch alone
    others = defaultdict(list)
    for line in lines:
        run = line["run"]
        usual = run["vocabulary"] == a.vocabulary and DECAY in run and not VARIED & run.keys()
        if usual and run["data"] != a.data:
            others[run["data"]].append(of_line(line))
    lines = [line for line in lines if line["run"]["data"] == a.data]
    groups = defaultdict(list)
    for line in lines:
        key = (line["run"][name] for name in KEYS)
        groups[tuple(key)].append(line)
    rows = [
        {
            "run": {
                name: line["run"].get(name) for name in ("optimizer", "peak_lr", "batch", DECAY)
            },
            "family": family,
            "width": width,
            "tokens": tokens,
            "vocabulary": vocabulary,
            "bits_per_byte": round(line["found"]["bits_per_byte"], 4),
        }
        for (width, _, tokens, vocabulary, family), group in sorted(groups.items())
        for line in sorted(group, key=lambda one: one["found"]["bits_per_byte"])
    ]
    best = [
        min(group, key=lambda one: one["found"]["bits_per_byte"])
        for key, group in groups.items()
        if key[3] == a.vocabulary and key[4] == "llama" and key[2] >= a.least_tokens
    ]
    points = [of_line(line) for line in best]
    if len(points) < FEWEST:
        return harness.Result(ours={"runs": rows}, quality={"passes": None})
    fit, errors = fitted(points, a.floor), left_out(points, a.floor)
    worst = max(abs(error) for error in errors)
    return harness.Result(
        ours={
            "fit": fit._asdict(),
            "worst_error": worst,
            "others": {name: scaled(fit, few) for name, few in others.items()},
            "runs": rows,
        },
        quality={"passes": worst < 0.03, "compared": "each run as the others foresee it"},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--runs", type=Path, required=True)
    p.add_argument("--data", default="two magazines and a site")
    p.add_argument("--least-tokens", type=int, default=4_000_000)
    p.add_argument("--floor", type=float, default=0.25, help="E, bits a byte")
    p.add_argument("--vocabulary", type=int, default=VOCABULARY)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)

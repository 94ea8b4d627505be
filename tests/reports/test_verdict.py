"""Verdict on a run, from made-up events: every cause named, shares that add up, odd files."""

import json
from pathlib import Path
from typing import Any

import pytest

from toque.hardware.thread_waits import BOUNDED
from toque.reports.verdict import (
    Verdict,
    describe_remedy,
    judge_run,
    list_ladders,
    list_signs,
)

TRAIN = {
    "pack": True, "batch": "4096 tokens", "micro_batch_rows": "auto", "keep_best": 1, "readers": 1,
    "evaluate_every": "10 steps", "save_every": "10 steps",
}  # fmt: skip
QUIET = {"seconds": 10.0, "own_cores": 2.0, "others_cores": 0.0, "waiting_for_core_seconds": 0.0,
         "asleep_seconds": 0.0, "memory_stall_seconds": 0.0, "major_faults": 0}  # fmt: skip
PARTS = {
    "forward_backward": 9.0,
    "optimizer": 0.5,
    "clip": 0.2,
    "data_wait": 0.1,
    "observers": 0.2,
}


def events(
    *,
    start: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    hardware: dict[str, Any] | None = None,
    arithmetic: dict[str, Any] | None = None,
    parts: dict[str, float] | None = None,
    host: dict[str, float] | None = None,
    more: list[dict[str, Any]] | None = None,
    **step: Any,
) -> list[dict[str, Any]]:
    """A run of 40 updates in 10 seconds, with nothing amiss but what is given."""
    first = {
        "event": "start", "step": 0, "precision": "bf16", "ranks": 1, "micro_batch_rows": 8,
        "row": {"source": 0, "target": 512},
        "hardware": {"device": "x86_64", "threads": 2, "cores": 2, "fast_bf16": True}
        | (hardware or {}),
        "arithmetic": {
            "products": 9e6, "attention": 1e6, "attention_computed": 1e6,
            "attention_kind": "variable-length",
        } | (arithmetic or {}),
        "train": TRAIN | (train or {}),
    } | (start or {})  # fmt: skip
    one = {
        "event": "step", "step": 40, "loss": 2.0, "grad_norm": 1.0, "tokens": 160_000,
        "seconds": 10.0, "pad_fraction": 0.02, "mfu": 0.6, "parts": PARTS | (parts or {}),
    } | step  # fmt: skip
    look = {"event": "system", "step": 40, "host": QUIET | (host or {}), "gpus": []}
    return [first, one, look, *(more or [])]


def written(folder: Path, told: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(event) + "\n" for event in told)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def judged(folder: Path, told: list[dict[str, Any]]) -> Verdict:
    verdict = judge_run(written(folder, told))
    assert verdict is not None
    return verdict


EVALUATED = [
    {"event": "evaluation", "step": 10 * n, "metrics": {"loss": 3.0 - n / 10}}
    for n in (1, 2, 3, 4)
]
SAVED = [{"event": "save", "step": 10 * n} for n in (1, 2, 3, 4)]

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "waiting for data": ({"parts": {"data_wait": 6.0}}, "train.readers=4"),
    "evaluation": (
        {"parts": {"evaluation": 5.0}, "more": EVALUATED},
        "train.evaluate_every=",
    ),
    "saving": ({"parts": {"saving": 5.0}, "more": SAVED}, "train.save_every="),
    "uploads": (
        {"more": [{"event": "after", "parts": {"uploads": 9.0}}]},
        "train.keep_best=0",
    ),
    "other programs": (
        {"host": {"others_cores": 2.0, "waiting_for_core_seconds": 5.0}},
        "OMP_WAIT_POLICY=PASSIVE",
    ),
    "threads": (
        {"hardware": {"threads": 1}, "host": {"own_cores": 1.0}},
        "OMP_NUM_THREADS",
    ),
    "float32": ({"start": {"precision": "float32"}}, "train.precision=auto"),
    "dense attention": (
        {
            "arithmetic": {"attention_kind": "masked", "attention_computed": 2e7},
            "train": {"compile": True},
        },
        "train.compile=false",
    ),
    "padding": ({"train": {"pack": False}, "pad_fraction": 0.7}, "train.pack=true"),
    "tiny batches": (
        {
            "tokens": 4_000,
            "train": {"batch": "1 examples"},
            "parts": {"optimizer": 5.0},
        },
        "train.batch=",
    ),
    "oversized micro-batch": (
        {
            "train": {"micro_batch_rows": 999},
            "start": {"micro_batch_rows": 999},
            "host": {"memory_stall_seconds": 6.0},
        },
        "train.micro_batch_rows=auto",
    ),
    "memory": (
        {"host": {"memory_stall_seconds": 6.0}},
        "train.gradient_checkpointing=true",
    ),
    "standing still": ({"host": {"asleep_seconds": 8.0}}, "look at what stops it"),
    "throttling": ({"host": {"throttled_seconds": 5.0}}, "raise the limit"),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named_with_its_lever(cause: str, tmp_path: Path) -> None:
    given, lever = CASES[cause]
    verdict = judged(tmp_path, events(**given))
    assert verdict.findings[0].cause == cause
    assert cause in verdict.sentence
    assert lever.lower() in describe_remedy(verdict.findings[0]).lower()
    assert sum(share.share for share in verdict.shares) == pytest.approx(1.0)
    assert sum(share.seconds for share in verdict.shares) == pytest.approx(
        verdict.facts.wall
    )


@pytest.mark.parametrize(
    "hardware",
    [
        {"waits": {"OMP_WAIT_POLICY": "PASSIVE"}},
        {"waits": {"GOMP_SPINCOUNT": "3"}},
        {"threads": 1},
        {"device": "NVIDIA H200"},
    ],
)
def test_sleeping_threads_are_advised_only_where_threads_spin(
    hardware: dict[str, Any], tmp_path: Path
) -> None:
    """The advice was given to a run that had OMP_WAIT_POLICY=PASSIVE already."""
    host = {"others_cores": 2.0, "waiting_for_core_seconds": 5.0}
    verdict = judged(tmp_path, events(hardware=hardware, host=host))
    (other,) = [one for one in verdict.findings if one.cause == "other programs"]
    assert describe_remedy(other).startswith("End the other programs (")
    spins = judged(tmp_path, events(hardware={"waits": BOUNDED}, host=host))
    assert "OMP_WAIT_POLICY=PASSIVE" in describe_remedy(spins.findings[0])


def test_a_length_that_is_no_number_is_passed_over(tmp_path: Path) -> None:
    given = {
        "tokens": 4_000,
        "train": {"batch": "1.2.3 examples"},
        "parts": {"optimizer": 5.0},
    }
    assert "tiny batches" not in [
        one.cause for one in judged(tmp_path, events(**given)).findings
    ]


COMPILED = {
    "train": {"pack": False, "compile": True},
    "pad_fraction": 0.6,
    "arithmetic": {"attention_kind": "masked", "attention_computed": 4e6},
    "parts": {"compiling": 4.0},
    "host": {"asleep_seconds": 4.0},
}
"""A run that computes padding, and whose first update waited for the compiler's processes."""


def test_compiling_is_a_share_of_its_own_and_what_goes_on_is_the_cause(
    tmp_path: Path,
) -> None:
    verdict = judged(tmp_path, events(**COMPILED))
    shares = {share.name: share.seconds for share in verdict.shares}
    assert shares["compiling"] == pytest.approx(4.0)
    assert "standing still" not in shares
    assert sum(shares.values()) == pytest.approx(verdict.facts.wall)
    assert verdict.findings[0].cause == "padding"
    assert "compiling" not in [finding.cause for finding in verdict.findings]


def test_an_interval_is_advised_up_to_half_the_run_and_then_fewer_texts(
    tmp_path: Path,
) -> None:
    """`train.evaluate_every="1240 %"` was advised to a run of 10 % whose evaluations are long."""
    often = [
        {"event": "evaluation", "step": 4 * n, "metrics": {"loss": 3.0}}
        for n in range(1, 11)
    ]
    train = {"evaluate_every": "10 %"}

    def advised(
        seconds: float, *, had: dict[str, Any], every: str = "10 %"
    ) -> tuple[str, ...]:
        told = events(
            start={"evaluation": had}, train=train | {"evaluate_every": every}, more=often,
            parts={"evaluation": seconds},
        )  # fmt: skip
        verdict = judged(tmp_path, told)
        return verdict.findings[0].settings

    had = {"max_examples": 512, "texts": 16}
    longest = "train.evaluate_every=50 %"
    both = (longest, "evaluation.max_examples=64", "evaluation.texts=4")
    assert advised(24.0, had=had) == both
    assert advised(24.0, had={"max_examples": None, "texts": 0}) == both[:2]
    for n in (29, 64):  # as many as are held out
        assert advised(24.0, had={"max_examples": n, "texts": 2}) == (longest,)
    assert advised(0.9, had=had) == (
        longest,
    )  # a twelfth of the time, and then a fiftieth
    assert advised(24.0, had=had, every="4 steps")[0] == "train.evaluate_every=20 steps"
    assert advised(24.0, had=had, every="0 %") == both[1:]
    assert advised(24.0, had=had, every="30 %") == both[1:]


def test_without_a_save_saving_is_no_cause(tmp_path: Path) -> None:
    """Where a loss is not finite, the search for its origin is timed as what came last."""
    verdict = judged(tmp_path, events(parts={"saving": 5.0}))
    assert "saving" not in [finding.cause for finding in verdict.findings]


def test_what_a_profiler_took_is_no_cause(tmp_path: Path) -> None:
    few = {"tokens": 4_000, "train": {"batch": "1 examples"}}
    found = judged(tmp_path, events(**few, parts={"profiling": 60.0}))
    alone = judged(tmp_path, events(**few))
    assert {share.name: share.seconds for share in found.shares}[
        "profiling"
    ] == pytest.approx(60.0)
    assert [(f.cause, f.weight) for f in found.findings] == [
        (f.cause, pytest.approx(f.weight)) for f in alone.findings
    ]
    shares = {
        share.name: share.seconds for share in found.shares if share.name != "profiling"
    }
    assert shares == pytest.approx(
        {share.name: share.seconds for share in alone.shares}
    )


def test_compiling_that_goes_on_is_named(tmp_path: Path) -> None:
    first, one, look = events(start={"compile": True}, parts={"compiling": 6.0})
    verdict = judged(tmp_path, [first, one, look, one | {"step": 80}])
    assert verdict.findings[0].cause == "compiling"
    assert "train.compile=false" in describe_remedy(verdict.findings[0])
    once = one | {"step": 80, "parts": PARTS}
    verdict = judged(tmp_path, [first, one, look, once])
    assert verdict.findings == ()


def test_a_run_that_computes_is_held_up_by_nothing(tmp_path: Path) -> None:
    verdict = judged(tmp_path, events())
    assert verdict.findings == ()
    assert "Nothing slows this run down" in str(verdict)
    shares = {share.name: share.seconds for share in verdict.shares}
    # 60 % of the peak over ten seconds, of which nine tenths are products with weights
    assert shares["matmuls"] == pytest.approx(5.4)
    assert shares["other computing"] == pytest.approx(9.0 - 5.4)
    assert shares["optimizer"] == pytest.approx(0.7)


def test_a_gain_is_that_of_the_time_saved(tmp_path: Path) -> None:
    verdict = judged(tmp_path, events(parts={"data_wait": 9.9}))
    waited = next(
        share.share for share in verdict.shares if share.name == "waiting for data"
    )
    assert verdict.findings[0].gain == pytest.approx(1.0 / (1.0 - waited) - 1.0)
    assert "at most 100%" in str(verdict)


def test_padding_costs_where_it_is_computed(tmp_path: Path) -> None:
    masked = {"attention_kind": "masked"}
    verdict = judged(tmp_path, events(arithmetic=masked, pad_fraction=0.5, mfu=0.1))
    assert next(
        s.seconds for s in verdict.shares if s.name == "padding"
    ) == pytest.approx(4.5)


def test_on_a_gpu_an_update_has_no_parts_and_idling_is_the_hosts_matter(
    tmp_path: Path,
) -> None:
    told = events(hardware={"device": "NVIDIA H200"}, parts={"observers": 5.0})
    names = {share.name for share in judged(tmp_path, told).shares}
    assert names == {"matmuls", "other computing", "waiting for data"}
    gpu = {"index": 0, "utilisation_percent": 40, "throttled": ["heat"]}
    more = [{"event": "system", "step": 40, "gpus": [gpu]}]
    verdict = judged(tmp_path, events(hardware={"device": "NVIDIA H200"}, more=more))
    assert {finding.cause for finding in verdict.findings} == {"host", "throttling"}


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"event": "start", "step": 0}\n'])
def test_without_an_update_there_is_no_verdict(tmp_path: Path, text: str) -> None:
    assert judge_run(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text(text)
    assert judge_run(tmp_path) is None


HOSTILE: list[Any] = [None, "x", -1, 1e308, [], {}, True, {"data_wait": "x"}, [[]]]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_values_of_any_kind_count_as_not_measured(tmp_path: Path, value: Any) -> None:
    names = (
        "parts",
        "host",
        "mfu",
        "pad_fraction",
        "grad_norm",
        "loss",
        "data_wait_seconds",
    )
    for name in names:
        verdict = judge_run(written(tmp_path, with_field(name, value)))
        if verdict is not None:
            assert sum(share.share for share in verdict.shares) == pytest.approx(1.0)
            list_signs(verdict.facts)
    for name in (
        "hardware",
        "arithmetic",
        "train",
        "row",
        "precision",
        "micro_batch_rows",
    ):
        told = events()
        told[0][name] = value
        judge_run(written(tmp_path, told))


def with_field(name: str, value: Any) -> list[dict[str, Any]]:
    told = events()
    told[2 if name == "host" else 1][name] = value
    return told


def test_memory_that_ran_out_has_its_ladder(tmp_path: Path) -> None:
    again = {
        "event": "warning",
        "step": 3,
        "message": "step 3 ran out of memory with 8 rows",
    }
    verdict = judged(tmp_path, events(more=[again]))
    (ladder,) = list_ladders(tmp_path, verdict.facts)
    assert ladder.title == "out of memory"
    assert ladder.steps[0] == "train.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("losses", "first"), [((3.0, 2.5), "train longer"), ((3.0, 3.0), "more recipes")]
)
def test_poor_texts_have_theirs(
    tmp_path: Path, losses: tuple[float, ...], first: str
) -> None:
    (tmp_path / "evaluation.json").write_text('{"generated": {"recipe_score": 0.2}}')
    scored = [{"event": "evaluation", "step": n, "metrics": {"loss": loss}}
              for n, loss in enumerate(losses)]  # fmt: skip
    verdict = judged(tmp_path, events(more=scored))
    (ladder,) = list_ladders(tmp_path, verdict.facts)
    assert ladder.steps[0].startswith(first)


def test_run_that_learns_from_rewards_is_judged_by_its_rewards(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"generated": {"recipe_score": 0.2}}')
    later = {"event": "step", "step": 80, "loss": 9.0, "reward": 0.4, "parts": PARTS}
    told = events(more=[later, *EVALUATED], reward=0.3)
    facts = judged(tmp_path, told).facts
    signs = {sign.name: sign for sign in list_signs(facts)}
    assert signs["reward rises"].good is True
    assert signs["reward rises"].value == "0.300 to 0.400"
    assert not [name for name in signs if "loss" in name]
    (ladder,) = list_ladders(tmp_path, facts)
    assert ladder.steps[0].startswith("a start model that imitates")
    assert not [step for step in ladder.steps if "loss" in step]


def test_the_share_in_the_sentence_is_that_of_the_table(tmp_path: Path) -> None:
    """88 % of the time went into evaluations, said the verdict, and the table 13.9 %."""
    after = {"event": "after", "parts": {"finishing": 60.0}}
    verdict = judged(
        tmp_path, events(parts={"evaluation": 9.0}, more=[*EVALUATED, after])
    )
    (share,) = (share for share in verdict.shares if share.name == "evaluation")
    assert share.share < 0.2
    assert verdict.findings[0].cause == "evaluation"
    assert f"{share.share:.0%} of the time went into 4 evaluations" in verdict.sentence

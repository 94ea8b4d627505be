"""Runs that texts share with training examples, beside a search of every place in plain Python."""

import numpy as np
import pytest

from toque.evaluation import memorisation
from toque.evaluation.memorisation import (
    LONG,
    RUN,
    Memorisation,
    SharedRun,
    SharedRunFinder,
    concatenate,
)
from toque.evaluation.ngram_metrics import hash_ngrams

Ids = list[int]


def slowly(text: Ids, prompt: Ids, examples: list[Ids]) -> tuple[int, int | None]:
    """The longest run of a text that is not its prompt's, and the first example that has it."""
    known = {tuple(prompt[i : i + RUN]) for i in range(len(prompt) - RUN + 1)}
    again = [i for i in range(len(text) - RUN + 1) if tuple(text[i : i + RUN]) in known]
    repeats = {i + k for i in again for k in range(RUN)}
    best: tuple[int, int | None] = (0, None)
    for row, example in enumerate(examples):
        for i in range(len(text)):
            for j in range(len(example)):
                n = 0
                while text[i + n : i + n + 1] == example[j + n : j + n + 1] != []:
                    n += 1
                own = sum(at not in repeats for at in range(i, i + n))
                if n >= RUN and own > best[0]:
                    best = (own, row)
    return best


def drawn(seed: int) -> tuple[list[Ids], list[Ids], list[Ids]]:
    """Texts, their prompts and examples, of so few different ids that much is shared."""
    rng = np.random.default_rng(seed)
    n_ids = int(rng.integers(1, 4))

    def some(n: int, least: int, most: int) -> list[Ids]:
        return [
            rng.integers(0, n_ids, rng.integers(least, most)).tolist() for _ in range(n)
        ]

    n = int(rng.integers(1, 5))
    return some(n, RUN, 30), some(n, 0, 20), some(int(rng.integers(1, 6)), 0, 30)


def found(
    texts: list[Ids], prompts: list[Ids], examples: list[Ids], *, parts: int
) -> SharedRunFinder:
    finder = SharedRunFinder(texts, prompts)
    for rows in np.array_split(np.arange(len(examples)), parts):
        finder.add_examples(*concatenate([examples[row] for row in rows]), rows)
    return finder


@pytest.mark.parametrize(
    "at_once", [1 << 20, 3]
)  # 3: every example and every text apart
@pytest.mark.parametrize("parts", [1, 3])
def test_runs_are_those_of_a_search_of_every_place(at_once, parts, monkeypatch):
    monkeypatch.setattr(memorisation, "_MAX_PAIRS", at_once)
    n_found = 0
    for seed in range(25):
        texts, prompts, examples = drawn(seed)
        runs = found(texts, prompts, examples, parts=parts).longest_runs()
        expected = [
            slowly(*both, examples) for both in zip(texts, prompts, strict=True)
        ]
        assert [(run.tokens, run.example) for run in runs] == expected, seed
        n_found += sum(run.tokens > RUN for run in runs)
    assert n_found > 10


def test_equal_hashes_of_other_tokens_lengthen_no_run(monkeypatch):
    def alike(tokens, n):
        hashes, texts = hash_ngrams(tokens, n)
        return hashes & np.uint64(7), texts

    monkeypatch.setattr(memorisation, "hash_ngrams", alike)
    n_found = 0
    for seed in range(25):
        texts, _, examples = drawn(seed)
        none: list[Ids] = [[] for _ in texts]
        for run, text in zip(
            found(texts, none, examples, parts=1).longest_runs(), texts, strict=True
        ):
            assert run.tokens <= slowly(text, [], examples)[0]
            n_found += run.tokens > 0
    assert n_found > 10


def test_no_run_crosses_from_one_example_to_the_next():
    text = [*range(20)]
    (run,) = found([text], [[]], [text[:9], text[9:]], parts=1).longest_runs()
    assert (run.tokens, run.example) == (11, 1)


def test_the_figures_stand_beside_those_of_people():
    runs = [SharedRun(n, 100, row) for row, n in enumerate((9, 31, 12, LONG))]
    one = Memorisation(runs[:2], runs[1:], 80, 80)
    assert str(one) == (
        "Of 2 texts, the longest span shared with a training example has 31 tokens, compared with "
        f"{LONG} for the held-out texts of the same prompts."
    )
    assert "80 of 160 examples were read" in str(Memorisation(runs[:1], [], 80, 160))
    assert one.record()["texts"] == {
        "n": 2, "median": 20.0, "p95": pytest.approx(29.9), "largest": 31, "example": 1,
        "largest_share": 0.31, "long_share": 0.0, "runs": [[9, 100, 0], [31, 100, 1]],
    }  # fmt: skip
    assert one.record()["references"]["long_share"] == 0.3333
    assert Memorisation([], runs, 80, 80).record()["texts"] == {"n": 0}
    assert str(Memorisation([], runs, 80, 80)) == ""

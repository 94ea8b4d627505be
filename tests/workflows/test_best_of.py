"""Best-of-n: the best by its score is returned, with that score and the mean of all."""

import json
from pathlib import Path
from statistics import fmean

import pytest

import toque
from plain_transformers import model_folder
from toque.cooking.recipe_scores import text_metrics
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError
from toque.evaluation import best_of
from toque.evaluation.best_of import BestOf
from toque.models.generation.options import GenerationOptions

PROMPT = "Generate recipe for: Pea Soup using ingredients: peas, onion"
GOOD = "Ingredients:\n- 2 cups peas\n- 1 onion, diced\n\nInstructions:\n1. Simmer the peas."
OTHER = GOOD.replace("peas", "beans")
NO_LIST = "Simmer."
SAMPLED = GenerationOptions(temperature=0.7)
LIKE = [[-1.0], [-3.0, -1.0], [-0.5, -2.5, -0.3]]
"""Means -1.0, -2.0 and -1.1; sums -1.0, -4.0 and -3.3."""


@pytest.mark.parametrize(
    ("by", "texts", "order", "used"),
    [
        ("recipe_score", [NO_LIST, OTHER, GOOD], [2, 1, 0], "recipe_score"),
        (None, [NO_LIST, OTHER, GOOD], [2, 1, 0], "cookable"),
        (
            "hallucinated_ingredients",
            [OTHER, GOOD, NO_LIST],
            [1, 0, 2],
            "hallucinated_ingredients",
        ),
        (
            "ingredient_coverage",
            [NO_LIST, GOOD, GOOD],
            [2, 1, 0],
            "ingredient_coverage",
        ),
        ("hallucinated_ingredients", [NO_LIST] * 3, [0, 2, 1], "likelihood"),
        ("likelihood", [NO_LIST, OTHER, GOOD], [0, 2, 1], "likelihood"),
    ],
    ids=["score", "usual", "lower is better", "tie", "nobody has it", "likelihood"],
)
def test_the_best_come_first(by, texts, order, used) -> None:
    ranked = BestOf(3, by).rank(PROMPT, texts, LIKE)
    assert [number for number, _ in ranked] == order
    for number, chosen in ranked:
        own = [fmean(logs) for logs in LIKE]
        if used != "likelihood":
            own = [text_metrics(PROMPT, text).get(used) for text in texts]
        assert (chosen.by, chosen.score, chosen.texts) == (used, own[number], 3)
        assert chosen.mean == fmean(score for score in own if score is not None)


def test_a_recipe_is_chosen_by_whether_one_can_cook_from_it() -> None:
    """The recipe score prefers a soup that is baked to one without an amount."""
    baked = GOOD.replace("the peas", "the peas and onion for 20 minutes")
    simmered = baked.replace("2 cups ", "")
    baked += "\n2. Preheat the oven to 350 degrees F.\n3. Bake for 20 minutes."
    for by, order in ((None, [1, 0]), ("recipe_score", [0, 1])):
        ranked = BestOf(2, by).rank(PROMPT, [baked, simmered], [[-1.0], [-1.0]])
        assert [number for number, _ in ranked] == order


def test_equals_keep_their_order_and_other_texts_go_by_likelihood() -> None:
    numbers = [number for number, _ in BestOf(3).rank(PROMPT, [GOOD] * 3, [[-1.0]] * 3)]
    assert numbers == [0, 1, 2]
    assert BestOf(2).rank("Once", ["a", "b"], [[-2.0], [-1.0]])[0][1].by == "likelihood"
    other = {"prompt": "How do I make a payment?", "texts": [GOOD, "Log in."]}
    ranked = BestOf(2).rank(**other, logprobs=[[-2.0], [-1.0]], knows_recipes=False)
    assert [number for number, _ in ranked] == [1, 0]
    with pytest.raises(ConfigError, match="does not ask for a recipe"):
        BestOf(2, "recipe_score").check_prompts(
            [other["prompt"]], in_json=False, knows_recipes=False
        )
    assert (
        BestOf(1).rank(PROMPT, ["{}"], [[-2.0]], in_json=True)[0][1].by == "likelihood"
    )


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (
            lambda: BestOf(8, "taste"),
            "Use likelihood or, for recipes, one of cookable, recipe",
        ),
        (lambda: BestOf(0), "at least 1"),
        (lambda: BestOf(1, "form"), "needs several texts"),
        (
            lambda: BestOf(8).check(GenerationOptions(), n_results=1),
            "all 8 texts would be the same",
        ),
        (
            lambda: BestOf(4).check(SAMPLED, n_results=5),
            "n is 5, but best_of generates only 4",
        ),
        (
            lambda: BestOf(4, "form").check_prompts([PROMPT, "Once"], in_json=False),
            "'Once' does not ask",
        ),
        (
            lambda: BestOf(4, "form").check_prompts([PROMPT], in_json=True),
            "is answered in JSON",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(refused, words) -> None:
    with pytest.raises(ConfigError, match=words):
        refused()


@pytest.fixture
def model(tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    return model_folder(tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]))


HOW = {"max_new_tokens": 12, "seed": 3, "device": "cpu"}


def test_the_best_of_the_texts_of_a_seed_is_returned(model: Path, monkeypatch) -> None:
    """By a scripted score, which the texts of a model with random weights differ in."""

    def e_in(_prompt: str, text: str, **_: bool) -> dict[str, float]:
        return {"form": text.count("e") / 40}

    monkeypatch.setattr(best_of, "text_metrics", e_in)
    prompts = ["soup", "bread: flour"]
    every = toque.generate(model, prompts, n=6, **HOW)
    assert every == toque.generate(model, prompts, n=6, best_of=1, **HOW)
    told = []
    found = toque.generate(
        model,
        prompts,
        n=2,
        best_of=6,
        by="form",
        on_text=lambda *one: told.append(one),
        **HOW,
    )
    assert told == [*enumerate(found)]
    assert found == toque.generate(model, prompts, n=2, best_of=6, by="form", **HOW)
    for at in (0, 1):
        own = every[6 * at : 6 * at + 6]
        scores = sorted((text.text.count("e") for text in own), reverse=True)
        best = found[2 * at : 2 * at + 2]
        assert scores[0] > scores[-1]
        assert [text.text.count("e") for text in best] == scores[:2]
        assert {text.text for text in best} <= {text.text for text in own}
        chosen = best[0].chosen
        assert chosen is not None
        assert chosen.score == scores[0] / 40
        assert chosen.mean == pytest.approx(fmean(scores) / 40)
        assert best[0].record()["best_of"]["texts"] == 6
        assert str(best[0]).endswith(f"\n\n[form {chosen.score:.3f}; mean of 6 texts "
                                     f"{chosen.mean:.3f}]\n")  # fmt: skip


def test_a_score_that_no_text_has_is_said(model: Path, capsys) -> None:
    """Random weights list no ingredients."""
    from toque.cli import main

    asked = [
        "generate",
        str(model),
        "--prompt",
        "soup: peas",
        "--best-of",
        "3",
        "--seed",
        "3",
    ]
    asked += ["--max-new-tokens", "8", "--json"]
    assert main([*asked, "--by", "hallucinated_ingredients"]) == 0
    out, said = capsys.readouterr()
    assert (
        "hallucinated_ingredients could not score the texts for 1 of 1 prompts" in said
    )
    found = json.loads(out)["best_of"]
    assert found["by"] == "likelihood"
    assert found["mean"] < found["score"] < 0
    assert main([*asked, "--temperature", "0"]) == 2
    assert "--best-of is 3, but at --temperature 0" in " ".join(
        capsys.readouterr().err.split()
    )

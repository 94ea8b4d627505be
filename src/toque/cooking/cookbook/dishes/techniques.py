"""Steps that many dishes share."""

from __future__ import annotations

from toque.cooking.cookbook.recipe_builder import Kitchen


def soften(k: Kitchen, where: str, fat: str, *names: str) -> None:
    """Cook aromatic vegetables in fat until soft."""
    listed = ", ".join(names)
    k.step(
        f"Heat the {{{fat}}} in {where} over medium heat. Add the {{{listed}}} and cook until "
        f"soft, about {{min}}.",
        f"Warm the {{{fat}}} in {where} over medium heat and cook the {{{listed}}} for {{min}}, "
        f"stirring often.",
        f"In {where}, heat the {{{fat}}} over medium heat. Cook the {{{listed}}} until tender, "
        f"{{min}}.",
        minutes=(5, 8, 1),
    )


def bloom(k: Kitchen, *names: str) -> None:
    """Cook garlic and spices for a moment, in what is already hot."""
    listed = ", ".join(names)
    k.step(
        f"Stir in the {{{listed}}} and cook for {{min}}, until fragrant.",
        f"Add the {{{listed}}} and stir for {{min}}.",
        f"Add the {{{listed}}} and cook until fragrant, about {{min}}.",
        minutes=(1, 2, 1),
    )


def season(k: Kitchen, garnish: str = "") -> None:
    """Salt, pepper and a garnish when there is one, then serve hot."""
    if garnish and k.has(garnish):
        k.step(
            f"Season with the {{salt, black pepper}}, top with the {{{garnish}}}, and serve.",
            f"Season with the {{salt, black pepper}}. Sprinkle with the {{{garnish}}} and serve "
            f"hot.",
            f"Add the {{salt, black pepper}} to taste and serve hot with the {{{garnish}}} on top.",
        )
    else:
        k.step(
            "Season with the {salt, black pepper} and serve hot.",
            "Stir in the {salt, black pepper}, taste, and serve.",
            "Add the {salt, black pepper} to taste and serve warm.",
        )


def salt_and_pepper(k: Kitchen, teaspoons: str = "1/8") -> None:
    """List salt (teaspoons per serving) and pepper."""
    k.add(f"{teaspoons} tsp salt", "1/16 tsp black pepper")


def boil_pasta(k: Kitchen, name: str = "pasta") -> None:
    """Cook the listed pasta in the listed water and salt, and drain it."""
    k.step(
        f"Bring the {{water, salt}} to a boil in a large pot. Cook the {{{name}}} until tender, "
        f"about {{min}}, and drain.",
        f"Boil the {{water}} with the {{salt}} in a large pot, add the {{{name}}}, and cook for "
        f"{{min}}. Drain.",
        f"In a large pot, boil the {{water, salt}}. Add the {{{name}}}, cook for {{min}}, and "
        f"drain well.",
        minutes=(8, 11, 1),
    )


def pasta_water(k: Kitchen) -> None:
    """List the water and salt that pasta is boiled in; little of the salt is eaten."""
    k.add("2 cup water", eaten=0.2)
    k.add("1/4 tsp salt", eaten=0.25)


def preheat(k: Kitchen, low: int, high: int, dish: str) -> None:
    """Heat the oven to a multiple of 25 degrees F and ready the dish."""
    degrees = k.between(low, high, 25)
    k.step(
        f"Preheat the oven to {degrees} degrees F and {dish}.",
        f"Heat the oven to {degrees} degrees F. {dish[:1].upper()}{dish[1:]}.",
        f"Set the oven to {degrees} degrees F and {dish}.",
    )

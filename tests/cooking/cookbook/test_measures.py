from __future__ import annotations

import pytest

from toque.cooking.cookbook.measures import measure, specification


@pytest.mark.parametrize(
    ("spec", "scale", "line"),
    [
        ("1/4 onion, chopped", 2, "1/2 yellow onion"),
        ("1/4 onion", 4, "1 yellow onion"),
        ("1/4 onion", 6, "2 yellow onions"),
        ("1/2 clove garlic", 1, "1 clove garlic"),
        ("1/2 clove garlic", 6, "3 cloves garlic"),
        ("1/4 can black beans", 8, "2 (15 ounce) cans black beans"),
        ("1/4 can crushed tomatoes", 4, "1 (28 ounce) can crushed tomatoes"),
        ("1/3 cup rice", 4, "1 1/3 cups long-grain white rice"),
        ("1/3 cup cooked rice", 1, "1/3 cup cooked rice"),
        ("1 tsp olive oil", 3, "1 tablespoon olive oil"),
        ("1/2 tbsp olive oil", 8, "1/4 cup olive oil"),
        ("1/8 tsp salt", 6, "3/4 teaspoon salt"),
        ("1/16 tsp salt", 1, "1/4 teaspoon salt"),
        ("1 pinch salt", 1, "1 pinch salt"),
        ("1 pinch salt", 4, "1/4 teaspoon salt"),
        ("2 oz spaghetti", 2, "4 ounces spaghetti"),
        ("3 oz spaghetti", 4, "3/4 pound spaghetti"),
        ("1/4 lb ground beef", 4, "1 pound ground beef"),
        ("1/3 lb ground beef", 6, "2 pounds ground beef"),
        ("1/4 egg", 2, "1 large egg"),
        ("2 slice bread", 2, "4 slices bread"),
        ("9/4 tsp yeast", 2, "1 1/2 tablespoons active dry yeast"),
    ],
)
def test_amounts_scale_and_read_well(spec, scale, line):
    assert measure(specification(spec), scale).line == line


def test_grams_follow_the_rounded_amount():
    assert measure(specification("1/4 onion"), 6).grams == 300.0
    assert measure(specification("1/2 cup flour"), 2).grams == 125.0
    assert measure(specification("1/4 lb ground beef"), 4).grams == pytest.approx(453.6)

"""What a page prints beside a recipe is no step and no ingredient, and is counted when it goes."""

from collections import Counter

import pytest

from toque.cooking.examples import UNKNOWN, examples_of
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.credits import without_credits
from toque.cooking.schemas.fields import records_of
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.sections import EQUIPMENT, SECTIONS, without_sections

LINES = [
    "2 cups dried peas",
    "3 cups vegetable broth",
    "1/2 teaspoon salt",
    "1 onion, diced",
]
STEPS = [
    "Boil the peas in the broth for 50 minutes.",
    "Blend and season with the salt.",
]


def read(**fields) -> tuple[Recipe | str, Counter[str]]:
    """The recipe of a record, through its schema's adapter, and what was repaired."""
    notes: Counter[str] = Counter()
    raw = {"title": "Pea Soup", "ingredients": LINES, "directions": STEPS} | fields
    (record,) = records_of(raw, (), notes)
    return record if isinstance(record, str) else recipe_of(record, notes), notes


def removed(notes: Counter[str]) -> dict[str, int]:
    """The notes of this page's rules."""
    words = ("removed", "joined", "only say", "sub-headings", "only an amount")
    return {
        what: n
        for what, n in notes.items()
        if n and any(word in what for word in words)
    }


def test_record_without_any_of_it_is_left_alone():
    recipe, notes = read()
    assert (recipe.ingredients, recipe.steps) == (tuple(LINES), tuple(STEPS))
    assert removed(notes) == {}


NO_STEPS = {
    "credits": (
        "Photograph by Ida Berg", "PHOTOGRAPHS BY IDA BERG; STYLING BY A. ROE", "Photo: Ida Berg",
        "Food styling by A. Roe", "Adapted from The Pea Book by Ida Berg (Green Press, 1999)",
        "(Credit belongs to my wife, Ida.)", "Fonte: Ida Berg", "Источник: Ида Берг",
        "*Recipe courtesy of Ida Berg, Chef of The Pod", "Recipe by Ida Berg",
        "Reprinted with permission from Peas Weekly",
        "This recipe was contributed by Ida Berg of Oslo.", "From the kitchen of Ida Berg",
        "© 2009 Peas Weekly. All rights reserved.", "Source: Peas Weekly, May 2009",
        "Note: adapted from Peas Weekly", "The Pea Year, by Ida Berg (Green House, 2003).",
        "Receta de Pod Magazine, número 12", "This is a fork of Ida's pea soup.",
    ),
    "notices of the page": (
        "Healthy Dish of the Day", "Watch the video", "Print this recipe",
        "Note: Nutritional analysis is per 1/4 cup.", "See more at: http://peas.example/soup#pod",
        "tags: soup, green", "Cook time may vary with the age of the peas.",
        "How to make Grandma's pea soup",
    ),
    "nutrition facts": (
        "Per serving: 230 calories, 3 g fat, 12 g protein",
        "Nutritional analysis per serving: 230 calories, 400 mg sodium",
        "Contains 2.3 g protein, 0.5 g fat and 37 mg sodium.",
        "each serving provides: 1 bread, 10 optional calories",
        "This bowl of soup has only 3 grams of fat and 120 calories.",
    ),
    "shopping notes": (
        "*Available at Nordic markets and some supermarkets.",
        "A flour of peas available at Nordic markets.",
    ),
    "yields": (
        "Serves 6.", "Makes about 2 1/2 dozen", "This recipe yields six to eight servings.",
        "Yield: 4 cups", "This makes a big batch, enough for a family.",
    ),
    "notes on wine": (
        "Wine: a dry rosé", "What to drink: a Riesling with some sweetness",
        "Pod Hill Estate Pinot Noir '06",
    ),
    "notes and tips": (
        "Cook's Note: Peas foam, so use a large pot.",
        "Tip: swap the peas for beans. Peel them first.",
        "Storage tip: the soup keeps for " + "three days " * 30,
        "Serving suggestions: dill, bread", "*Marrow peas are dried on the plant.",
        "**We had our peas from a shop in Oslo.",
        "Grandma Ida has been making this her entire life.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"), [(line, why) for why, lines in NO_STEPS.items() for line in lines]
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_no_step_goes_from_anywhere_and_is_counted(line, why, at):
    steps = [*STEPS[:at], line, *STEPS[at:]]
    recipe, notes = read(directions=steps)
    assert recipe.steps == tuple(STEPS)
    assert removed(notes) == {f"{why} among the steps removed": 1}


@pytest.mark.parametrize(
    "lines",
    [
        [
            "Adapted from Pea Collection Series,",
            "Soup",
            ", by Ida B. Berg (Green House, 2003).",
        ],
        ["The Pea Year: 100 Soups", "by Ida Berg and A. Roe (Green House, 2003)."],
        ["Recipe courtesy of", "Ida Berg", "The Green Pod, Oslo"],
        [
            "Reprinted with permission from",
            "Cooking with Peas",
            "by Ida Berg",
            "© 2003 Pod House",
        ],
    ],
)
def test_a_credit_of_several_lines_goes_whole(lines):
    recipe, notes = read(directions=[*STEPS, *lines])
    assert recipe.steps == tuple(STEPS)
    assert removed(notes) == {"credits among the steps removed": len(lines)}


def test_what_stands_after_a_credit_stays_where_steps_follow():
    steps = [
        "Recipe by Ida Berg",
        "Pea Purée",
        *STEPS,
        "Photograph by Ida Berg",
        "Serve Hot",
    ]
    recipe, notes = read(directions=steps)
    assert recipe.steps == (f"Pea Purée: {STEPS[0]}", STEPS[1], "Serve Hot")
    assert notes["credits among the steps removed"] == 2


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        ("Makes 3 cups.", {"yields": 1}), ("Watch Now", {"notices of the page": 1}),
        ("Photograph by Ida Berg", {"credits": 1}), ("Makes 3 cups. Serves 6.", {"yields": 2}),
        ("(Keeps 2 days.) Makes about 3/4 cup.", {"yields": 1}),
        ("Makes 35 cups. Contains 88 calories per serving.", {"yields": 1, "nutrition facts": 1}),
    ],
)  # fmt: skip
def test_sentences_that_end_a_step_and_are_no_part_of_it_go(end, counts):
    kept = f"{STEPS[1]}{' (Keeps 2 days.)' if 'Keeps' in end else ''}"
    recipe, notes = read(directions=[STEPS[0], f"{STEPS[1]} {end}"])
    assert recipe.steps == (STEPS[0], kept)
    assert removed(notes) == {
        f"{what} among the steps removed": n for what, n in counts.items()
    }


def test_a_short_line_heads_its_step_where_every_step_has_a_full_stop():
    recipe, notes = read(directions=["Boil the peas", *STEPS])
    assert recipe.steps == (f"Boil the peas: {STEPS[0]}", STEPS[1])
    assert removed(notes) == {"section names joined to their step": 1}
    recipe, _ = read(directions=["Boil the peas", STEPS[0].rstrip("."), STEPS[1]])
    assert len(recipe.steps) == 3


@pytest.mark.parametrize(
    "step",
    [
        "Adapt the heat to your oven and bake until set.",
        "Recipes like this one want a heavy pot.", "Source a heavy pot and warm it.",
        "Per serving, ladle 1 cup of soup over the rice.",
        "Serve the dish of the day in warm bowls, each with a spoon of cream.",
        "Watch the pot now and stir when it foams.",
        "Use whatever peas are available at home and boil them.",
        "Print a leaf on the dough by pressing it down gently.",
        "Picture a clock and set the slices at twelve and six.", "Garnish.",
        "For the best colour keep the lid off",
        "Text on a screen cannot tell you: taste and season.", "Serve 4 pancakes to each guest.",
        "This makes a nice topping for ice cream.", "Makes the soup taste of spring.",
        "Wine: add 1 cup and boil until it is gone.", "Pour the wine of 2005 over the peas.",
        "Drain by hand (wear gloves).", "Tip the soup into bowls.",
        "Note the colour; it should be green.",
    ],
)  # fmt: skip
def test_steps_that_only_look_like_it_stay(step):
    recipe, notes = read(directions=[*STEPS, step])
    assert recipe.steps == (*STEPS, step)
    assert removed(notes) == {}


@pytest.mark.parametrize(
    "heading",
    [
        "Directions",
        "PREPARATION",
        "Procedure:",
        "__Ingredients__",
        "Zubereitung",
        "How to make it",
    ],
)
def test_heading_words_are_no_steps_on_a_line_or_before_one(heading):
    for steps in ([heading, *STEPS], [f"Directions: {STEPS[0]}", STEPS[1]]):
        recipe, notes = read(directions=steps)
        assert recipe.steps == tuple(STEPS)
        assert set(removed(notes).values()) == {1}


@pytest.mark.parametrize("part", ["Lemon Glaze", "Dill Sauce (make ahead)"])
def test_a_part_of_the_dish_opens_the_step_it_names(part):
    recipe, notes = read(directions=[part, *STEPS])
    assert recipe.steps == (f"{part}: {STEPS[0]}", STEPS[1])
    assert removed(notes) == {"section names joined to their step": 1}


@pytest.mark.parametrize(
    ("lines", "kept", "counts"),
    [
        (["Special equipment: a food mill; kitchen string"], [], {"equipment": 1}),
        (["Special equipment", "a food mill", "A deep-fry thermometer"], [], {"equipment": 3}),
        (["12 bamboo skewers, soaked", "Kitchen twine", "parchment paper"], [], {"equipment": 3}),
        (["6 wooden or metal skewers"], [], {"equipment": 1}),
        (["Ingredient info: Roast pea flour is sold in spring."], [], {"shopping": 1}),
        (["Garnish", "fresh mint"], ["fresh mint"], {"section names": 1}),
        (["Accompaniments: lime wedges; rye bread"], ["lime wedges", "rye bread"], {"before": 1}),
        (["Optional garnish: Mint"], ["Mint"], {"before": 1}),
        (["Glaze: 1 cup sugar"], ["1 cup sugar"], {"before": 1}),
        (["Filling", "1 cup ham"], ["1 cup ham"], {"section names": 1}),
        (["FOR THE SAUCE", "CRUMB TOPPING", "1 cup ham"], ["1 cup ham"],
         {"section names": 1, "sub-headings": 1}),
        (["For the sauce:", "1 cup ham"], ["1 cup ham"], {"sub-headings": 1}),
        (["*available at Nordic markets"], [], {"shopping": 1}),
        (["Recipe adapted from Peas Weekly"], [], {"credits": 1}),
        (["60 ml", "2 cups each:"], [], {"only an amount": 2}),
        (["12-inch baking dish", "a frying basket", "2 cedar planks"], [], {"equipment": 3}),
        (["Note: peas can be soaked overnight", "Serve with bread (if possible)"], [],
         {"notes": 1, "section names": 1}),
        (["*If dried peas are hard to find, fresh ones can be used.", "Makes about 3 cups"], [],
         {"notes": 2}),
        (["A pod of a wild pea; sold frozen or sometimes fresh at Nordic markets."], [],
         {"shopping": 1}),
        (["For the sauce:", "of soy sauce:"], ["of soy sauce:"], {"sub-headings": 1}),
    ],
)  # fmt: skip
def test_what_is_no_ingredient_is_counted_by_its_reason(lines, kept, counts):
    recipe, notes = read(ingredients=[*LINES, *lines])
    assert recipe.ingredients == (*LINES, *kept)
    found = removed(notes)
    assert sorted(found.values()) == sorted(counts.values())
    assert all(any(word in what for what in found) for word in counts), found


@pytest.mark.parametrize(
    "line",
    [
        "8 rice paper wrappers", "1 pound chicken skewers", "1 cup EVOO", "EVOO",
        "2 cinnamon sticks", "1 bunch fresh dill tied with kitchen twine",
        "1 tablespoon pickling spice, wrapped in cheesecloth",
        "2 tablespoons pink pepper (sold as whole pods)", "1 cup ranch dressing",
        "1 package ice cream cones", "2 lemons, for garnish", "1 (9 inch) pie crust",
        "Chocolate Frosting", "pan drippings", "Dressing",  # the last line heads nothing
        "SALT",
    ],
)  # fmt: skip
def test_foods_that_only_look_like_it_stay(line):
    recipe, notes = read(ingredients=[*LINES, line])
    assert recipe.ingredients == (*LINES, line)
    assert removed(notes) == {}


def test_a_list_of_names_alone_has_no_headings():
    names = ["pork", "Sauce", "Dough", "onion"]
    recipe, notes = read(
        ingredients=names, directions=[*STEPS, "Roll the dough out thinly."]
    )
    assert recipe.ingredients == tuple(names)
    assert removed(notes) == {}


@pytest.mark.parametrize("box", ["▢", "☐", "□", "✓", "[ ]", "[x]", "• ▢"])
def test_boxes_to_tick_off_are_no_words(box):
    lines = [f"{box} {line}" for line in LINES]
    steps = [f"{box} {step}" for step in STEPS]
    recipe, _ = read(ingredients=lines, directions=steps)
    if box != "• ▢":  # one sign a line is what pages print
        assert (recipe.ingredients, recipe.steps) == (tuple(LINES), tuple(STEPS))


def test_prompts_ask_for_foods():
    lines = [*LINES, "Garnish: fresh mint", "Special equipment: a food mill", "▢ 1 cup 10x sugar",
             "2 cups pasta (such as penne (or rigatoni))"]  # fmt: skip
    recipe, notes = read(ingredients=lines)
    (example,) = examples_of(recipe, notes)
    assert example.prompt.endswith("onion, fresh mint, confectioners' sugar, pasta")


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (["Mix and bake."], True),  # nine ingredients may need no more words
        (["Bake at 350°, 20 min"], True), (["Stir. Chill it."], True), (["Mix."], False),
        (["Ice // rocks"], False), (["very good cake"], False),
    ],
)  # fmt: skip
def test_few_words_that_tell_how_are_enough(steps, kept):
    recipe, _ = read(
        ingredients=[*LINES, "2 cups brown sugar", "1 cup butter"], directions=steps
    )
    assert (recipe != "too short") is kept


FRENCH = ["Faire cuire les pois dans le bouillon avec l'oignon pendant une heure.",
          "Mixer la soupe et ajouter le sel avec un peu de crème."]  # fmt: skip


def test_no_class_is_estimated_of_another_language():
    lines = ["500 g beurre", "300 g sugar", "2 oignons"]
    recipe, notes = read(title="Soupe", ingredients=lines, directions=FRENCH)
    (columns,) = (e.columns for e in examples_of(recipe, notes))
    assert columns["nutrition"] == columns["nutrition_from"] == UNKNOWN
    assert columns["nutrition_coverage"] == 0.0
    assert notes["recipes in French (labels know English only)"] == 1
    assert notes["nutrition class unknown"] == 1
    assert isinstance(
        examples_of(recipe, Counter(), ("nutrition",)), str
    )  # no label, no example
    # Figures and labels of the source need no language.
    figures = {"fat_g": 40.0, "saturated_fat_g": 20.0, "sugar_g": 5.0}
    for given, code in (
        ({"nutrition": figures}, 2),
        ({"nutrition_class": "Moderate"}, 1),
    ):
        (example,) = examples_of(*read(directions=FRENCH, **given))
        assert example.columns["nutrition"] == code


def test_a_long_heading_before_every_paragraph_opens_it():
    paragraphs = [
        f"{step} Wait for a minute or two before the next." for step in STEPS * 2
    ]
    heads = [
        f"Put the heavy pot on large stove number {n}" for n in ("one", "two", "six")
    ]
    steps = [
        heads[0],
        paragraphs[0],
        heads[1],
        paragraphs[1],
        heads[2],
        *paragraphs[2:],
    ]
    recipe, _ = read(directions=steps)
    joined = [
        f"{head}: {text}" for head, text in zip(heads, paragraphs[:3], strict=True)
    ]
    assert recipe.steps == (*joined, paragraphs[3])


def test_a_name_at_the_end_goes_and_sentences_without_a_stop_stay():
    recipe, notes = read(directions=[*STEPS, "Pod Hill Green Noir"])
    assert recipe.steps == tuple(STEPS)
    assert removed(notes) == {"credits among the steps removed": 1}
    for last in ("Enjoy", "Serve With Bread", "Eat it hot"):
        assert read(directions=[*STEPS, last])[0].steps[-1] == last


def test_numbers_without_a_point_are_no_part_of_a_step():
    recipe, _ = read(directions=[f"{n} {step}" for n, step in enumerate(STEPS, 1)])
    assert recipe.steps == tuple(STEPS)


@pytest.mark.parametrize(
    "line",
    [
        "Time: 1 hour.", "Difficulty: easy", "Yield: Serves 3-4.", "instructions on peapod.com",
        "Get more recipes on my blog", "This dip is especially good when served with bread",
        "Can also use this recipe for beans.", "For a lighter version use milk.", "I love this!",
        "Pancetta, bacon cured in salt, is available at Nordic markets.", "Note-If dry, add water.",
    ],
)  # fmt: skip
def test_notes_and_offers_are_not_steps(line):
    recipe, notes = read(directions=[*STEPS, line])
    assert recipe.steps == tuple(STEPS)
    assert sum(removed(notes).values()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "I like to use scissors to cut the rolls.", "In a bowl stir in peas sold in jars.",
        "Good cooks wait a day.", "For the lighter half use the milk.", "Enjoy!",
    ],
)  # fmt: skip
def test_steps_that_only_look_like_notes_stay(line):
    assert read(directions=[*STEPS, line])[0].steps == (*STEPS, line)


def test_the_rest_of_a_note_goes_with_it():
    note = [
        "Note: To toast the pecans, heat a skillet.",
        "Add the pecans and toast 6-8 min.",
    ]
    recipe, _ = read(directions=[*STEPS, *note])
    assert recipe.steps == tuple(STEPS)
    recipe, _ = read(directions=[STEPS[0], f"{STEPS[1]} {' '.join(note)}"])
    assert recipe.steps == tuple(STEPS)
    recipe, _ = read(directions=[STEPS[0], *note, STEPS[1]])
    assert recipe.steps == tuple(STEPS)
    recipe, notes = read(directions=[*STEPS, "Serve it hot.", *note])
    assert recipe.steps == (*STEPS, "Serve it hot.")
    assert notes["notes and tips among the steps removed"] == 2


def test_a_note_glued_to_a_yield_goes():
    recipe, notes = read(
        directions=[*STEPS, "Makes 16Note: when cold, the soup is thick."]
    )
    assert recipe.steps == tuple(STEPS)
    assert notes["notes and tips among the steps removed"] == 1


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "line",
    [
        "I got this soup from a friend of the family.", "My husband says that it is the best.",
        "Thanks to the neighbour for the idea.", "I've been wondering about it for a year.",
    ],
)  # fmt: skip
def test_texts_of_the_writer_at_either_end_are_no_steps(line, at):
    recipe, _ = read(directions=[*STEPS[:at], line, *STEPS[at:]])
    assert recipe.steps == tuple(STEPS)


@pytest.mark.parametrize(
    "line",
    [
        "This is a traditional white soup of the coast.", "Tried this out and it was amazing.",
        "These peas have the power of ten and will be loved.", "Here's a tasty soup for you.",
        "A friend of the house gave this to the cooks.", "It is hard to find peas in the north.",
        "Peas are fine and this is a great way for them to be eaten.",
    ],
)  # fmt: skip
def test_texts_about_the_dish_before_the_steps_go(line):
    recipe, notes = read(directions=[line, *STEPS])
    assert recipe.steps == tuple(STEPS)
    assert notes["texts about the dish among the steps removed"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "A zöld borsó a legjobb.", "Store the peas in the fridge and keep it cool.",
        "Slip the skins from the peas with your fingers.", "The pan can be of iron for this.",
        "A day ahead, soak the peas.", "It will take the peas up to an hour: wait for it.",
        "Have your mom or dad toast the peas in the oven.",
    ],
)  # fmt: skip
def test_first_steps_that_only_look_like_texts_stay(line):
    assert read(directions=[line, *STEPS])[0].steps == (line, *STEPS)


@pytest.mark.parametrize(
    ("heading", "title", "steps"),
    [
        ("BISCUITS", "Copycat Cheddar Biscuit", ""),
        ("Vegetarian Spring Roll", "Vegetarian Spring Rolls with Peas", ""),
        ("Garlic Lime Hoisin Sauce", "Rolls", "Roll. Garlic Lime Hoisin Sauce: Crush."),
    ],
)
def test_a_heading_repeats_the_title_or_heads_steps(heading, title, steps):
    foods = ("2 cups peas", "1 cup flour", "3 eggs")
    lines = (foods[0], heading, *foods[1:])
    notes: Counter[str] = Counter()
    assert without_sections(lines, notes, title=title, steps=steps) == foods
    assert notes == {SECTIONS: 1}


def test_a_food_of_the_title_is_an_ingredient():
    lines = ("2 cups peas", "Chicken", "Olive oil", "3 eggs", "1 lime")
    title = "Chicken with Olive Oil"
    assert without_sections(lines, Counter(), title=title, steps="Heat.") == lines


@pytest.mark.parametrize(
    "tool",
    ["8 ice pop sticks or wooden coffee stirrers", "10-inch nonstick frying pan"],
)
def test_sticks_and_pans_are_equipment(tool):
    notes: Counter[str] = Counter()
    assert without_sections(("2 cups peas", tool), notes) == ("2 cups peas",)
    assert notes == {EQUIPMENT: 1}


def test_a_note_on_work_done_ahead_is_not_a_step():
    steps = ("Boil the peas.", "Do Ahead: Peas can be cooked 3 days ahead. Chill.")
    assert without_credits(steps, Counter()) == steps[:1]


@pytest.mark.parametrize(
    ("changes", "lines", "steps"),
    [
        ({"directions": ["Bereiding", *STEPS]}, LINES, STEPS),
        ({"directions": [*STEPS, "In full disclosure, we received a sample of peas."]}, LINES,
         STEPS),
        ({"ingredients": [*LINES, "I've found that peas taste best in the month of May."]}, LINES,
         STEPS),
        ({"ingredients": [*LINES, "Optioneel: dille"]}, [*LINES, "dille"], STEPS),
        ({"ingredients": [*LINES, "of white pepper"]}, [*LINES, "white pepper"], STEPS),
        ({"ingredients": [*LINES, "1 egg", "1 egg"]}, [*LINES, "1 egg", "1 egg"], STEPS),
    ],
)  # fmt: skip
def test_what_another_judge_found_is_cleaned(changes, lines, steps):
    recipe, _ = read(**changes)
    assert isinstance(recipe, Recipe)
    assert recipe.ingredients == tuple(lines)
    assert recipe.steps == tuple(steps)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"directions": ["Pea Soup Recipe"]}, "no steps"),
        ({"ingredients": ["Cut into wedges each:", "2 peas", "Toss in the mixture of this:",
          "1 egg", "For raita, mix in a bowl and chill:", "1 cup yogurt"]},
         "steps among the ingredients"),
    ],
)  # fmt: skip
def test_a_recipe_without_its_method_is_dropped(changes, reason):
    assert read(**changes)[0] == reason


def test_a_list_of_ingredients_is_not_a_step():
    listed = ["Ingredients", "1 ounce yogurt", "2 tablespoons mayonnaise", *STEPS]
    recipe, notes = read(directions=["Take a bowl.", *listed])
    assert isinstance(recipe, Recipe)
    assert recipe.steps == ("Take a bowl.", *STEPS)
    assert notes["lists of ingredients among the steps removed"] == 1

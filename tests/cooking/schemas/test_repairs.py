from collections import Counter

import pytest

from toque.cooking.schemas.repairs import (
    is_cut_off,
    only_a_link,
    rejoin_sentences,
    untokenised,
    with_apostrophes,
    without_boilerplate,
    without_misprints,
)
from toque.cooking.schemas.repetitions import without_repeat

A = "Beat the egg whites until they are stiff."
B = "Fold in the sugar a spoon at a time."
C = "Bake until golden, about half an hour."


@pytest.mark.parametrize(
    ("steps", "once"),
    [
        ([A, B, C, A, B, C], [A, B, C]),
        ([f"{A} {B} {C}", A, B, C], [A, B, C]),
        ([A, B, C, f"{A} {B} {C}"], [A, B, C]),
        ([f"{A} {B}", A, B, "* Any sugar will do."], [A, B, "* Any sugar will do."]),
        ([A, B, A, B.upper().replace(" ", "  ")], [A, B]),
    ],
)
def test_doubled_instructions(steps, once):
    notes: Counter[str] = Counter()
    assert without_repeat(steps, notes) == once
    assert notes == {"doubled instructions": 1}


@pytest.mark.parametrize(
    "steps",
    [
        [], [A], [A, B, C], ["Stir.", "Stir."], ["Stir. Stir."],
        [A, B, C, A, B, "Make the glaze and spread it on top."],
        [A, "Chill.", B, "Chill.", C, "Chill."],
        [A, B, C, "Turn the cake.", "Ice it.", "Wait.", A], [f"{A} {B} {C} {A}"],
    ],
)  # fmt: skip
def test_recipes_that_only_look_doubled(steps):
    notes: Counter[str] = Counter()
    assert without_repeat(steps, notes) == steps
    assert not notes


@pytest.mark.parametrize(
    ("steps", "once"),
    [
        ([f"For the cake: {A} {B}", A, B, C], [f"For the cake: {A}", B, C]),
        ([f"Make the cake {A} {B}", A, B, C], [f"Make the cake: {A}", B, C]),
        ([f"{C} {A} {B}", A, B], [f"{C} {A}", B]),
        ([C, f"Why? {A} {B}", A, B], [C, f"Why? {A}", B]),
        ([C, f"Cook's Notes {A} {B}", A, B], [C, f"Cook's Notes: {A} {B}"]),
        ([C, A + B + C + A, "Wait.", A + B + C + A], [C, A + B + C + A, "Wait."]),
        ([A, f"{B} {C}", A, B, C, "Eat."], [A, B, C, "Eat."]),
    ],
)
def test_paragraphs_that_the_next_steps_repeat(steps, once):
    notes: Counter[str] = Counter()
    assert without_repeat(steps, notes) == once
    assert notes == {"doubled instructions": 1}


def test_an_ingredient_that_repeats_the_line_before_is_read_once():
    lines = ["1 tsp salt", "1 tsp Salt", "2 eggs", "1 tsp salt"]
    notes: Counter[str] = Counter()
    assert without_repeat(lines, notes, "doubled lists of ingredients", shortest=1) == [
        "1 tsp salt", "2 eggs", "1 tsp salt"
    ]  # fmt: skip
    assert notes == {"lines that repeat the line before": 1}


def test_a_doubled_list_of_ingredients_is_read_once():
    lines = ["20 g sunflower oil", "50 g popping corn", "3 tbsp white sugar"]
    notes: Counter[str] = Counter()
    assert (
        without_repeat([*lines, *lines], notes, "doubled lists of ingredients") == lines
    )
    assert notes == {"doubled lists of ingredients": 1}
    for good in ([*lines, *lines[:2]], ["salt", "dill", "salt", "dill"]):
        assert without_repeat(good, Counter(), "doubled lists of ingredients") == good


def test_a_long_line_that_repeats_the_one_before_it_goes():
    notes: Counter[str] = Counter()
    assert without_repeat([B, A, A, C], notes) == [B, A, C]
    assert notes == {"lines that repeat the line before": 1}


def test_boilerplate_of_pages():
    notes: Counter[str] = Counter()
    lines = [
        "2 eggs",
        "Add all ingredients to list",
        "salt ADVERTISEMENT",
        "Add all the sugar",
    ]
    assert without_boilerplate(lines, notes) == ["2 eggs", "salt", "Add all the sugar"]
    assert notes["boilerplate lines"] == 2


@pytest.mark.parametrize(
    ("steps", "joined"),
    [
        ("Freeze juice | and | berries. | Serve.", "Freeze juice and berries. | Serve."),
        ("Bake for | 20 minutes. | Cool.", "Bake for 20 minutes. | Cool."),
        ("bake for 1 | 5 hours | serve", "bake for 1.5 hours | serve"),
        ("use a 9 | 5 x 12 inch tin | bake", "use a 9.5 x 12 inch tin | bake"),
        ("add 2 tsp | of oil to add more shine | stir",
         "add 2 tsp of oil to add more shine | stir"),
        ("Mix (I use a sieve | and a spoon.) | Bake.", "Mix (I use a sieve and a spoon.) | Bake."),
        ("Bake it. | Top with | Pea Cream.", "Bake it. | Top with Pea Cream."),
        ("Ladle the soup evenly among all of the eight large | bowls. | Eat.",
         "Ladle the soup evenly among all of the eight large bowls. | Eat."),
        ("Add 1. | 5 cups broth. | Boil.", "Add 1.5 cups broth. | Boil."),
        ("Boil 30 sec. | or until hot.", "Boil 30 sec. or until hot."),
        ("Add 1 tsp. | salt and stir.", "Add 1 tsp. salt and stir."),
        ("bake at 350 deg | f | for 20 minutes", "bake at 350 deg f for 20 minutes"),
        ("Add the peas to the | boiling broth.", "Add the peas to the boiling broth."),
        ("Heat 5 min., then stir for about 25 | minutes.",
         "Heat 5 min., then stir for about 25 minutes."),
        ("Season the chops, bone-in | Salt them. Wait.", ""), ("Add (1 cup | 1) peas | Stir.", ""),
        ("Mix. | 1. Bake it | 2. Cool it.", ""), ("mix it | bake it | eat it", ""),
        ("You need: | peas | dill | Boil.", ""), ("Heat oven to 350 | mix the peas. | Stir.", ""),
        ("heat to 350 | in a bowl, mix peas", ""),
        ("Boil 2 cups of peas, | 1/2 cup of rice. | Stir.", ""),
        ("Mix (well) | then bake. | Cool: | wait.", ""),
    ],
)  # fmt: skip
def test_sentences_split_in_the_middle(steps, joined):
    """Steps parted by bars; without anything beside them they stay as they are."""
    assert " | ".join(rejoin_sentences(steps.split(" | "), Counter())) == (
        joined or steps
    )


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("11/2 cups rice", "1 1/2 cups rice"), ("1 12 cups rice", "1 1/2 cups rice"),
        ("34 cup rice or 12 cup bulgur", "3/4 cup rice or 1/2 cup bulgur"),
        ("1/ 2 cup rice", "1/2 cup rice"), ("1 tsp . salt , fine", "1 tsp. salt, fine"),
        ("2 cloves garlic (, minced)", "2 cloves garlic (minced)"),
        ("1 cup flour** (sifted)¹", "1 cup flour (sifted)"),
        ('the"lid" of salt& oil', 'the "lid" of salt & oil'), ("Ann'S Pea Soup", "Ann's Pea Soup"),
        ("Boil it.. Then wait,. Stir.", "Boil it. Then wait. Stir."), ("peas ,and dill",
        "peas, and dill"),
        ("peas,chopped, ( packed )dill", "peas, chopped, (packed) dill"), ("in the the pan",
        "in the pan"),
        ("peas(optional)", "peas (optional)"), ("(about 2 cups)peas", "(about 2 cups) peas"),
        ("heat to 400*F, then 350* for an hour", "heat to 400°F, then 350° for an hour"),
        ("Saut peas, crme frache", "Sauté peas, crème fraîche"), ("salt u0026 dill", "salt & dill"),
        ("**Mix** the __dry__ *peas* and _dill_", "Mix the dry peas and dill"),
        ("2 smalls peas", "2 small peas"), ("peas ((12 oz each))", "peas (12 oz each)"),
        ("dont stop if theyre hot, theres time", "don't stop if they're hot, there's time"),
        ("Pea Sauceepi:recipelink, warm", "Pea Sauce , warm"),
        ("2 recipesPea Dough", "2 recipes Pea Dough"), ("1 cup peas ($0.45)", "1 cup peas"),
        ("1 cup peas Podmart 1 lb For $0.99 thru 02/09", "1 cup peas"),
        ("Guten Appetit! :-)", "Guten Appetit!"), ("eat it ;)", "eat it"),
        ("Boil it.\\r\\n", "Boil it."), ("Serve cold.\\", "Serve cold."),
        ("serve w / syrup", "serve w/ syrup"),
        ("2 tbsp honey ()", "2 tbsp honey"), ("dill ( ), fresh", "dill, fresh"),
        ("uniamo i piselli [12] e il burro [1].", "uniamo i piselli e il burro."),
        ("Cool it.(Can be made ahead.)", "Cool it. (Can be made ahead.)"),
        ("(Wait first.)Boil it", "(Wait first.) Boil it"),
        ("a 3-inchpea tuile", "a 3-inch pea tuile"),
    ],
)  # fmt: skip
def test_misprints_within_a_line(line, right):
    notes: Counter[str] = Counter()
    assert without_misprints([line, "salt"], notes) == [right, "salt"]
    assert notes.total() >= 1


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("2 cups peas (see cooks' note, below), hot", "2 cups peas, hot"),
        ("2 eggs (fresh; see Tip)", "2 eggs (fresh)"),
        ("1 tsp salt, see notes above", "1 tsp salt"),
        ("1 cup rice (for grain-free see notes)", "1 cup rice (for grain-free)"),
        ("Boil it. See note for other pans. Eat.", "Boil it. Eat."),
        ("1 cup aioli (recipe follows)", "1 cup aioli"), ("6 crepes (recipe below)", "6 crepes"),
        ("1 cup aioli (recipe follows or store-bought)", "1 cup aioli (store-bought)"),
        ("1 cup pea flour (available at Nordic markets), sifted", "1 cup pea flour, sifted"),
        ("2 cups frisee (chicory, sold at some markets)", "2 cups frisee (chicory)"),
        ("1/2cup peas", "1/2 cup peas"), ("cup ¼ of raisins", "¼ cup raisins"),
        ("stir inthe peas, cut inhalf", "stir in the peas, cut in half"),
        ("low- salt broth in a sauce- pan", "low-salt broth in a saucepan"),
        ("Bake at 450:F", "Bake at 450°F"), ("bake@ 350", "bake at 350"),
        ("cook for l hour", "cook for 1 hour"), ("2 Podco(R) peas", "2 Podco peas"),
    ],
)  # fmt: skip
def test_references_to_other_texts_and_lost_spaces(line, right):
    notes: Counter[str] = Counter()
    assert without_misprints([line, "salt"], notes) == [right, "salt"]
    assert notes.total() == 1


@pytest.mark.parametrize(
    "line",
    [
        "Stir until you see the bottom of the pan.", "See that the rice is soft.",
        "Wait to see if it sets, then see to the sauce.", "short- or long-grain rice",
        "low- nebo plnotučné mléko", "polo- nebo", "half- und ganz",
        "Follow the recipe on the box.", "50g butter",
        "Wait ... then eat...", "2 clove(s) garlic", "een (hand)mixer", "2,5 dl melk", "5 * 3 cm",
        "saute the crepes", "snake_case and 2*3*4", "12 cups rice", "12 ounces peas",
        "12 cupcakes", "a 10 or 12 cup pan", "Lait : 25 cl", "two 9-inches peas", "peas (R.A.)",
        "see (above): peas", "salt (1) pea",
        "cut into 1cm³ pieces", "wait . . . longer",
        "8 1/2-inch pieces",
    ],
)  # fmt: skip
def test_lines_that_only_look_misprinted_stay(line):
    notes: Counter[str] = Counter()
    assert without_misprints([line], notes) == [line]
    assert notes.total() == 0


def test_spaces_around_a_fraction_slash():
    assert without_misprints(["1 1 ⁄ 2 cups rice"], Counter()) == ["1 1⁄2 cups rice"]


def test_spaces_before_punctuation():
    notes: Counter[str] = Counter()
    lines = ["cook , covered , , 1 / 2 hour ( or so )", "sherbet / sorbet", "wait"]
    mended = ["cook, covered, 1/2 hour (or so)", "sherbet / sorbet", "wait"]
    assert untokenised(lines, notes) == mended
    what = ("recipes with spaces before punctuation", "recipes with fractions mended")
    assert notes == dict.fromkeys(what, 1)


@pytest.mark.parametrize(
    ("steps", "link"),
    [
        (['<p>See the full recipe at <a href="x">Because I Cook.</a></p>'], True),
        (["for instructions check how to make chutney on a cook's recipes"], True),
        (["Click here for the method"], True),
        (["Find a large pot. Boil the recipe's beans in it."], False),
        (["See that the beans are soft, then drain them and season to taste."], False),
        (
            [
                "Check the seasoning.",
                "Serve with the sauce from the other recipe, warm.",
            ],
            False,
        ),
        ([], False),
    ],
)
def test_steps_that_only_link(steps, link):
    assert only_a_link(steps) is link


@pytest.mark.parametrize(
    ("title", "right"),
    [
        ("momma s pea soup", "momma's pea soup"), ("i can t believe it s peas",
        "i can't believe it's peas"),
        ("you ll love it if i m there", "you'll love it if i'm there"),
        ("they ve got peas and we re off", "they've got peas and we're off"),
        ("plan b peas t bone", ""), ("m m peas", ""), ("vitamin d shake", ""), ("s mores", ""),
    ],
)  # fmt: skip
def test_apostrophes_that_an_export_lost(title, right):
    notes: Counter[str] = Counter()
    assert with_apostrophes(title, notes) == (right or title)
    assert notes.total() == bool(right)


@pytest.mark.parametrize(
    ("line", "repaired"),
    [
        ("Cook the peas 3 5 minutes.", "Cook the peas 3-5 minutes."),
        ("Bake 25 30 min. or more", "Bake 25-30 min. or more"),
        ("Bake at 350 20 minutes.", "Bake at 350 20 minutes."),
        ("Turn it 2 10 minutes apart.", "Turn it 2 10 minutes apart."),
        ("Bake for 1 2 minutes", "Bake for 1-2 minutes"),
        ("Form three layers. .", "Form three layers."),
        ("Wait . . . and eat.", "Wait . . . and eat."),
        ("Mix with ** 1/2 cup oil.", "Mix with 1/2 cup oil."),
        ("A pan of 8 * 8 inches", "A pan of 8 * 8 inches"),
    ],
)
def test_lost_dashes_and_stray_marks(line, repaired):
    assert without_misprints([line], Counter()) == [repaired]


def test_footnotes_glued_into_a_sentence_are_removed():
    lines = [
        "SiftYou can use a sieve for this, too. the flour.",
        "McCoy peas. Then mix.",
    ]
    notes: Counter[str] = Counter()
    assert without_misprints(lines, notes) == ["Sift the flour.", lines[1]]
    assert notes == {"recipes with footnotes removed": 1}


@pytest.mark.parametrize(
    ("line", "repaired"),
    [
        ("1/4 teaspoon tsp cumin", "1/4 teaspoon cumin"),
        ("1 pkt -Active yeast", "1 pkt Active yeast"),
        ("30 g yeast, -=OR=-", "30 g yeast"),
        ("Fry for 1 to2 minutes", "Fry for 1 to 2 minutes"),
        ("Mix for 10  15 minutes", "Mix for 10-15 minutes"),
    ],
)
def test_doubled_units_and_marks_of_a_program(line, repaired):
    assert without_misprints([line], Counter()) == [repaired]


def test_a_size_cut_at_its_decimal_point_is_joined():
    steps = ["remove the peas from the heat and spread them in a 10", "5 x 15 inch pan"]
    assert rejoin_sentences(steps, Counter(), anywhere=True) == [
        "remove the peas from the heat and spread them in a 10.5 x 15 inch pan"
    ]


@pytest.mark.parametrize(
    ("step", "is_cut"),
    [
        ("Prepare the topping. and sea salt. Simmer for 5 minutes.", True),
        ("Boil the peas. And then the dill.", False),
        ("Heat it approx. and stir.", False),
    ],
)
def test_a_sentence_without_its_beginning(step, is_cut):
    assert is_cut_off(step) == is_cut

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.labelled_lines import scores_of_file
from toque.cooking.cookbook.recipes import recipes
from toque.cooking.ingredients.names import ingredient_name
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.labels.foods import find_food

# line -> quantity, unit, size, name, preparation
LINES = [
    ("2 cups flour", 2, "cup", "", "flour", ""),
    ("1 1/2 tsp. salt", 1.5, "teaspoon", "", "salt", ""),
    ("1-1/2 cups milk", 1.5, "cup", "", "milk", ""), ("1½ cups milk", 1.5, "cup", "", "milk", ""),
    ("⅔ cup rice", 2 / 3, "cup", "", "rice", ""),
    ("1 and 1/2 cups oats", 1.5, "cup", "", "oats", ""),
    (".5 l water", 0.5, "litre", "", "water", ""),
    ("1,5 kg potatoes", 1.5, "kilogram", "", "potatoes", ""),
    ("1,000 g sugar", 1000, "gram", "", "sugar", ""),
    ("2-3 carrots", (2, 3), None, "", "carrots", ""),
    ("2 to 3 tablespoons olive oil", (2, 3), "tablespoon", "", "olive oil", ""),
    ("2 – 3 tbsp olive oil", (2, 3), "tablespoon", "", "olive oil", ""),
    ("½–1 tsp chilli flakes", (0.5, 1), "teaspoon", "", "chilli flakes", ""),
    ("1 T butter", 1, "tablespoon", "", "butter", ""),
    ("1 t vanilla", 1, "teaspoon", "", "vanilla", ""),
    ("two large eggs, beaten", 2, None, "large", "eggs", "beaten"),
    ("half a dozen eggs", 6, None, "", "eggs", ""),
    ("a dozen oysters", 12, None, "", "oysters", ""),
    ("2 dozen eggs", 24, None, "", "eggs", ""),
    ("1 1/2 dozen eggs", 18, None, "", "eggs", ""),
    ("a pinch of salt", 1, "pinch", "", "salt", ""),
    ("pinch of salt", None, "pinch", "", "salt", ""),
    ("a few drops vanilla extract", 3, "drop", "", "vanilla extract", ""),
    ("about 20 mint leaves", 20, None, "", "mint leaves", ""),
    ("1 (16 ounce) can black beans, drained", 1, "can", "", "black beans", "drained"),
    ("1 16-oz. can black beans", 1, "can", "", "black beans", ""),
    ("2 x 400g tins chopped tomatoes", 2, "can", "", "tomatoes", "chopped"),
    ("1 (3 1/2) pound whole chicken", 1, None, "", "whole chicken", ""),
    ("1 (4-serving size) package jelly", 1, "package", "4-serving size", "jelly", ""),
    ("10g/½oz salt", 10, "gram", "", "salt", ""),
    ("1lb 2oz/500g minced beef", 1, "pound", "", "minced beef", ""),
    ("1 cup plus 2 tablespoons sugar", 1, "cup", "", "sugar", ""),
    ("2 garlic cloves, finely chopped", 2, "clove", "", "garlic", "finely chopped"),
    ("3 cloves garlic", 3, "clove", "", "garlic", ""), ("4 cloves", 4, None, "", "cloves", ""),
    ("2 celery stalks, sliced", 2, "stalk", "", "celery", "sliced"),
    ("2 sticks butter, softened", 2, "stick", "", "butter", "softened"),
    ("1 small handful basil", 1, "handful", "small", "basil", ""),
    ("2 heaped tablespoons flour", 2, "tablespoon", "heaped", "flour", ""),
    ("2 loosely packed cups spinach", 2, "cup", "loosely packed", "spinach", ""),
    ("1 cup freshly grated Parmesan", 1, "cup", "", "Parmesan", "freshly grated"),
    ("1 cup packed brown sugar", 1, "cup", "", "brown sugar", "packed"),
    ("10 ounces frozen chopped spinach", 10, "ounce", "", "frozen chopped spinach", ""),
    ("3 ripe medium tomatoes", 3, None, "medium", "ripe tomatoes", ""),
    ("4 skinless, boneless chicken breasts", 4, None, "", "skinless, boneless chicken breasts", ""),
    ("3 cups water, chicken broth, or stock", 3, "cup", "", "water, chicken broth, or stock", ""),
    ("juice of 1 lemon", 1, None, "", "lemon", "juice of"),
    ("grated zest of 2 limes", 2, None, "", "limes", "grated zest of"),
    ("200g/7oz 00 flour", 200, "gram", "", "00 flour", ""),
    ("1 can or bottle beer", 1, "can", "", "beer", ""),
    ("1 cup half & half", 1, "cup", "", "half & half", ""),
    ("salt and freshly ground black pepper", None, None, "", "salt and black pepper",
     "freshly ground"),
    ("9 oz bacon, one-quarter minced", 9, "ounce", "", "bacon", "one-quarter minced"),
    ("Vegetable oil for frying", None, None, "", "Vegetable oil", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "quantity", "unit", "size", "name", "preparation"), LINES
)
def test_lines(line, quantity, unit, size, name, preparation):
    read = parse_line(line)
    if quantity is not None and not isinstance(quantity, tuple):
        quantity = (quantity, quantity)
    assert read.quantity == (None if quantity is None else pytest.approx(quantity))
    assert (read.unit, read.size, read.name) == (unit, size, name)
    assert read.preparation == preparation


@pytest.mark.parametrize(
    ("line", "amounts"),
    [
        ("1 (16 ounce) can beans", ["1 can whole", "16 ounce each"]),
        ("250ml/9fl oz milk", ["250 millilitre whole", "9 fluid ounce same"]),
        ("1 cup plus 2 tablespoons sugar", ["1 cup whole", "2 tablespoon plus"]),
        (
            "2 eggplants (about 1½ pounds total), peeled",
            ["2 None whole", "1.5 pound same"],
        ),
        ("6 pork chops, 12 to 14 ounces each", ["6 None whole", "12-14 ounce each"]),
    ],
)
def test_every_measure_of_a_line_is_kept_with_its_role(line, amounts):
    found = [
        f"{low:g}{f'-{high:g}' if high > low else ''} {unit} {role}"
        for (low, high), unit, role in parse_line(line).amounts
    ]
    assert found == amounts


def test_remarks_and_purposes():
    read = parse_line("200g plain flour, plus extra for dusting (see Notes)")
    assert read.comment == "plus extra for dusting, see Notes"
    assert parse_line("parsley, to garnish").purpose == "to garnish"
    assert parse_line("salt to taste").comment == "to taste"
    assert parse_line("salt to taste").name == "salt"
    assert parse_line("1 tbsp sesame seeds (optional)").optional
    assert parse_line("Optional: 2 cups custard").optional
    assert not parse_line("2 cups custard").optional


ODD = ["", " ", "(", "((", ")(", "1", "1/", "½", "-", "a", "or", "1 x", "x" * 5000]


@pytest.mark.parametrize(
    ("line", "quantity", "unit", "name"),
    [
        ("one and a half cups milk", 1.5, "cup", "milk"),
        ("Two and three-quarters cups milk", 2.75, "cup", "milk"),
        ("1 and a half cups milk", 1.5, "cup", "milk"), ("2 & 1/2 cups milk", 2.5, "cup", "milk"),
        ("three quarters of a cup milk", 0.75, "cup", "milk"),
        ("a quarter of a pound of butter", 0.25, "pound", "butter"),
        ("one-third cup oil", 1 / 3, "cup", "oil"), ("two thirds cup oil", 2 / 3, "cup", "oil"),
        ("one eighth teaspoon cayenne", 1 / 8, "teaspoon", "cayenne"),
        ("half-cup sugar", 0.5, "cup", "sugar"), ("half an onion", 0.5, None, "onion"),
        ("one and a half dozen eggs", 18, None, "eggs"), ("fifteen olives", 15, None, "olives"),
        ("twenty-four clams", 24, None, "clams"), ("a hundred grams butter", 100, "gram", "butter"),
        ("two hundred and fifty grams flour", 250, "gram", "flour"),
        ("one-two cups stock", (1, 2), "cup", "stock"),
        ("between three and four cups rice", (3, 4), "cup", "rice"),
        ("from 2 to 4 carrots", (2, 4), None, "carrots"),
        ("half to three quarters of a cup oil", (0.5, 0.75), "cup", "oil"),
        ("two to two and a half cups rice", (2, 2.5), "cup", "rice"),
        ("eight to a dozen clams", (8, 12), None, "clams"),
        ("a clove or two of garlic", (1, 2), "clove", "garlic"),
        ("a cup or two tablespoons milk", 1, "cup", "milk"),
        ("two, three or four leeks", (2, 4), None, "leeks"),
        ("two-to-three cups milk", (2, 3), "cup", "milk"),
        ("2 / 3 cup rice", 2 / 3, "cup", "rice"), ("1/100 oz saffron", 0.01, "ounce", "saffron"),
        ("21⁄2 cups rice", 2.5, "cup", "rice"), ("15⁄16 cup rice", 15 / 16, "cup", "rice"),
        ("4 three-inch cinnamon sticks", 4, None, "cinnamon sticks"),
        ("1 half-pint raspberries", 1, None, "half-pint raspberries"),
        ("half and half", None, None, "half and half"),
        ("1 cup half and half", 1, "cup", "half and half"),
        ("one fifth of gin", 1, None, "fifth of gin"),
        ("1/12 cup oil", 1 / 12, "cup", "oil"), ("5/16 tsp yeast", 5 / 16, "teaspoon", "yeast"),
        ("1/32 teaspoon saffron", 1 / 32, "teaspoon", "saffron"),
        ("⅐ cup oil", 1 / 7, "cup", "oil"), ("1 3⁄7 cups oil", 10 / 7, "cup", "oil"),
        ("¹/₂ cup oil", 0.5, "cup", "oil"), ("1¹⁄₂ cups oil", 1.5, "cup", "oil"),
        ("¹¹/₁₂ cup oil", 11 / 12, "cup", "oil"), ("⅟2 cup oil", 0.5, "cup", "oil"),
        ("１/２ cup oil", 0.5, "cup", "oil"), ("1/3rd cup oil", 1 / 3, "cup", "oil"),
        ("1st pressing olive oil", None, None, "1st pressing olive oil"),
        ("1/4 cup 1st pressed olive oil", 0.25, "cup", "1st pressed olive oil"),
        ("2 cups 4th generation honey", 2, "cup", "4th generation honey"),
        ("one 1st-cut brisket", 1, None, "1st-cut brisket"),
    ],
)  # fmt: skip
def test_numbers_in_words_ordinals_and_fractions(line, quantity, unit, name):
    read = parse_line(line)
    low, high = quantity if isinstance(quantity, tuple) else (quantity, quantity)
    assert read.quantity == (None if low is None else pytest.approx((low, high)))
    assert (read.unit, read.name) == (unit, name)


@pytest.mark.parametrize("line", ODD)
def test_odd_lines_are_read_as_names(line):
    assert isinstance(parse_line(line).name, str)


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(line):
    read = parse_line(line)
    assert all(amount.unit is None or amount.unit in UNITS for amount in read.amounts)
    if read.quantity is not None:
        assert read.quantity[0] <= read.quantity[1]


_PIECES = [
    *(
        "1",
        "1/2",
        "½",
        "cup",
        "oz",
        "large",
        "chopped",
        "garlic",
        "cloves",
        "juice",
        "fresh",
    ),
    *(
        "of",
        "plus",
        "a",
        "or",
        "to",
        "for",
        "serving",
        "x",
        "(",
        ")",
        ",",
        "-",
        "/",
        ";",
    ),
]


@given(st.lists(st.sampled_from(_PIECES), max_size=14))
def test_no_order_of_usual_words_breaks_the_parser(pieces):
    parse_line(" ".join(pieces))
    parse_line("".join(pieces))


def test_the_cookbooks_lines_are_understood():
    lines = {line for recipe in recipes(400, seed=5) for line in recipe.ingredients}
    for line in lines:
        read = parse_line(line)
        assert read.quantity is not None, line
        assert not any(character.isdigit() for character in read.name), line
        assert find_food(read.name) is not None, line


def test_labelled_lines(shared):
    result = scores_of_file(
        shared / "data" / "recipes" / "ingredient_lines_labelled.csv"
    )
    for half in ("development", "held_out"):
        assert result[half]["quantity"] >= 0.97
        assert result[half]["unit"] >= 0.965
        assert result[half]["name"] >= 0.92


def test_a_flour_whose_name_is_a_number():
    assert parse_line("00 flour").name == "00 flour"
    assert parse_line("0 cups flour").quantity == (0.0, 0.0)


@pytest.mark.parametrize(
    "line", ["² eggs", "10 cm² nori", "2² cups", "① egg", "٣ eggs", "৪ cups"]
)
def test_signs_that_count_as_digits_are_survived(line):
    assert parse_line(line).name


@pytest.mark.parametrize(
    ("line", "name", "amounts"),
    [
        ("1 lb pasta (such as penne (or rigatoni))", "pasta", [(1.0, "pound")]),
        ("2 cups pasta )", "pasta", [(2.0, "cup")]),
        ("1/2 cup (1 stick (4 ounces)) butter", "butter",
         [(0.5, "cup"), (1.0, "stick"), (4.0, "ounce")]),
        ("1 cup milk (240 ml [8 oz])", "milk",
         [(1.0, "cup"), (240.0, "millilitre"), (8.0, "ounce")]),
        ("1 cup 10x sugar", "confectioners' sugar", [(1.0, "cup")]),
        ("2 c. 10X powdered sugar, sifted", "confectioners' sugar", [(2.0, "cup")]),
        ("1 box 10-x sugar", "confectioners' sugar", [(1.0, "box")]),
        ("2 big red onions", "red onions", [(2.0, None)]),
        ("1 can No.21 tomatoes", "tomatoes", [(1.0, "can")]),
        ("1 No. 2 can pineapple", "pineapple", [(1.0, "can")]),
        ("1 (No. 303) can peas", "peas", [(1.0, "can")]),
        ("1 #10 can beans", "beans", [(1.0, "can")]),
        ("10 x 2 inch sugar wafers", "sugar wafers", None),
        ("1 cup Mexican sugar", "Mexican sugar", [(1.0, "cup")]),
    ],
)  # fmt: skip
def test_rewritten_lines(line, name, amounts):
    assert ingredient_name(line) == name
    if amounts is not None:
        found = [
            (a.quantity and a.quantity[0], a.unit) for a in parse_line(line).amounts
        ]
        assert found == amounts


@pytest.mark.parametrize("depth", [2, 50, 5000])
def test_brackets_of_any_depth(depth):
    line = "1 cup rice " + "(white " * depth + "grain" + ")" * depth
    assert parse_line(line).name == "rice"
    assert ingredient_name("2 eggs " + "(" * depth) == ingredient_name("2 eggs (")
    assert ingredient_name("2 eggs " + ")" * depth) == "eggs"

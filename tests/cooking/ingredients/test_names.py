import pytest

from toque.cooking.ingredients.names import (
    forms,
    has_quantity,
    head_noun,
    ingredient_name,
    is_clean_name,
    stem,
)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("1 (16 ounce) can black beans, drained and rinsed", "black beans"),
        ("2 1/2 cups finely chopped red onions", "red onions"),
        ("3 cloves garlic, minced", "garlic"), ("2 garlic cloves, crushed", "garlic"),
        ("salt to taste", "salt"), ("A pinch of cayenne pepper", "cayenne pepper"),
        ("½ cup grated Parmesan cheese", "Parmesan cheese"),
        ("1½ pounds carrots, peeled", "carrots"), ("100g/3½oz plain flour", "plain flour"),
        ("1-2 tablespoons olive oil, plus extra for frying", "olive oil"),
        ("1 pound boneless, skinless chicken breasts", "skinless chicken breasts"),
        ("2 large eggs", "eggs"), ("- 1 cup milk", "milk"), ("juice of 1 lemon", "lemon"),
        ("water, chicken broth, or stock", "water"), ("two", "two"),
        ("2 pkg. each: peas, beans", "peas"), ("2 each apples, cored", "apples"),
        ("1 cup each: milk and sour cream", "milk and sour cream"), ("4 x limes", "limes"),
        ("1 cup or so mayonnaise", "mayonnaise"), ("a pinch or two of salt", "salt"),
        ("1 qt. to 1 gal. apple juice", "apple juice"), ("1 cup or more 7-Up", "7-Up"),
        ("1/2 cup So Green® oat milk", "So Green® oat milk"),
        ("16-ounce jar mild, medium, or hot salsa", "hot salsa"),
        ("1 cup half and half", "half and half"), ("2 ripe medium size bananas", "ripe bananas"),
        ("1/2 can per each serving beans", "beans"),
        ("4 1-inch-thick wedges red onion", "red onion"), ('1 2" piece ginger', "ginger"),
        ("1 9-inch pie crust", "pie crust"), ("2 cups crumbs made from rye bread", "crumbs"),
        ("1/4 cup starch dissolved in", "starch"),
        ("1 T. dried basil I use sweet basil", "dried basil"), ("5 eggs separated", "eggs"),
        ("1 cup cooked medium grain rice", "medium grain rice"), ("400 gramos de pasta", "pasta"),
        ("120g de sucre", "sucre"), ("2 dientes de ajo", "ajo"),
        ("3 colheres (sopa) de azeite", "azeite"), ("2 EL Olivenöl", "Olivenöl"),
        ("2 spsk. sukker", "sukker"), ("1 can Del Pod beans", "Del Pod beans"),
        ("4 medium sized pears", "pears"), ("20 oz. or 3-pack pear soda", "pear soda"),
        ("1 cup pitted and coarsely chopped plums", "pitted plums"),
        ("coarse salt and freshly cracked pepper", "coarse salt and pepper"),
        ("1 long, flat, boned eel", "flat eel"),
        ("2 tablespoons small, preferably Danish, shrimps", "shrimps"),
        ("1 stick ((8 tbsp) margarine)", "margarine"),
        ("pear ice cream as an accompaniment", "pear ice cream"), ("Plenty of dill", "dill"),
        ("1 oz St. Pea liqueur", "St. Pea liqueur"), ("groch 2 sztuki", "groch"),
        ("3 eetlepels erwten", "erwten"), ("snuf suiker", "suiker"), ("etwas Dill", "Dill"),
        ("2 c. à soupe de pois", "pois"), ("1 cuill. à café d'huile", "huile"),
        ("1 colher (chá) de ervilha", "ervilha"), ("2 ст. л. гороха", "гороха"),
        ("3 克 豌豆", "豌豆"),
        ("2 gousses d'ail", "ail"), ("3 pièce(s) Poireau", "Poireau"),
        ("q.b. piselli", "piselli"), ("Le jus d'1/2 orange", "orange"),
        ("1 c. café noir", "café noir"), ("filets d'oie", "filets d'oie"),
        ("2 eggs beaten lightly", "eggs"),
        ("a glaze made by whisking 1 egg with 2 tablespoons cream", "glaze"),
        ("2 teaspoons starch dissolved in 1 tablespoon milk", "starch"),
        ("mint leaves for decoration", "mint leaves"), ("2 leeks chopped small", "leeks"),
        ('1 3"-4"-thick eel steak', "eel steak"), ("Butter für die Form", "Butter"),
        ("2 kleine Gurke(n)", "Gurke"), ("2 à 3 blokjes bouillon", "bouillon"),
        ("1 e 1/2 xícara de ervilha", "ervilha"), ("半个 豌豆", "豌豆"),
        ("1 5-ounce log nut paste", "nut paste"),
        ("4 medium size, rather soft pears", "rather soft pears"), ("pear slices", "pear slices"),
        ("4 slices pear", "pear"), ("the kernels cut from 3 ears of maize", "maize"),
        ("1 cup margarine room temperature", "margarine"),
        ("1 tsp dill salt *in the jar", "dill salt"), ("1/2 + 1/3 cup nut butter", "nut butter"),
        ("1 lata | latas de ervilha", "ervilha"), ("2 c.à.s d'huile", "huile"),
        ("2 kvister dill", "dill"), ("3 - Green Pears, peeled", "Green Pears"),
        ("2 tsp (4g) - Dill", "Dill"), ("1 egg beaten to blend with 1 spoon cream", "egg"),
        ("2 sticks margarine room temp.", "margarine"), ("Dill + Mint", "Dill + Mint"),
        ("1 cup margarine + 2 tbsp", "margarine"), ("margarine + extra for the tin", "margarine"),
        ("1 bag each of peas, beans and maize", "peas and beans and maize"),
        ("1 cup peas, beans, or maize", "peas"),
        ("3 ears maize, husks and silks removed", "maize"),
        ("1 Optional Garnish: grated maize", "maize"), ("200 g Erbsen z.B. junge", "Erbsen"),
        ("3 None limes, juiced", "limes"), ("N/A dill", "dill"),
        ("as needed maize seeds", "maize seeds"),
        ("8 oz smoked eel or other, fully cooked fish", "smoked eel"),
        ("1 cup consommé combined with 2 cups water", "consommé"),
        ("1 (6 ounce) tube maize paste", "maize paste"),
        ("2 cans oil-packed, tart plums", "tart plums"),
    ],
)  # fmt: skip
def test_names(line, name):
    assert ingredient_name(line) == ingredient_name(name) == name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1 cup rice", True), ("½ onion", True), ("a handful of mint", True),
        ("salt and pepper to taste", True), ("two eggs", True), ("rice", False),
        ("fresh mint", False), ("1/2", False), ("a", False), ("", False),
    ],
)  # fmt: skip
def test_quantities(line, expected):
    assert has_quantity(line) is expected


def test_heads_and_stems():
    assert [head_noun(n) for n in ("bay leaves", "cream of tartar", "egg whites", "")] == [
        "leaf", "cream", "white", "",
    ]  # fmt: skip
    assert [stem(w) for w in ("dishes", "olives", "molasses", "peas", "gas", "chives")] == [
        "dish", "olive", "molass", "pea", "gas", "chive",
    ]  # fmt: skip


def test_forms_are_all_words_of_a_stem():
    words = "leaf leaves loaf loaves half halves berry berries pie pies tomato tomatoes dish dishes"
    words += " peach peaches glass glasses box boxes couscous gas egg eggs olive hummus molasses"
    for word in words.split():
        assert word in forms(stem(word))
        assert {stem(form) for form in forms(stem(word))} == {stem(word)}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("1 pouch of instant barley", "instant barley"), ("1 Pd Sausage", "Sausage"),
        ("4 (1 liter) cups chicken stock", "chicken stock"), ("2 (packed) cups dill", "dill"),
        ("3/4 of a cup of warm water", "warm water"), ("Can of black beans", "black beans"),
        ("4 toasted slices of bread", "bread"), ("1 (16 ounce) pound cake", "pound cake"),
        ("1 1-pint basket fresh berries", "fresh berries"), ("2 bars (50 g) nougat", "nougat"),
        ("1/2 cup water mixed with salt", "water"), ("1 lemon zested and juiced", "lemon"),
        ("1/2 cup raisins soaked in rum", "raisins"), ("1 tsp. brown sugar each", "brown sugar"),
        ("butter with 1/2 tsp vanilla", "butter"), ("1 cup rice with 2% milk", "rice with 2% milk"),
        ("1 cup broth I like low-salt", "broth"), ("Plum tomato 5 nos", "Plum tomato"),
        ("3 cans green beans drained or 2 pounds fresh", "green beans"),
        ("1 cup mixed nuts", "mixed nuts"), ("2count Huevos", "Huevos"),
        ("dsh Hot pepper sauce", "Hot pepper sauce"), ("tray ice cubes", "ice cubes"),
        ("1 boks hermetiske tomater", "hermetiske tomater"),
        ("1 (1.5 fluid ounce) jigger pea vodka", "pea vodka"), ("2 jiggers gin", "gin"),
        ("4 links pea sausage", "pea sausage"), ("1 branch dill", "dill"),
        ("1/2 bushel peas", "peas"), ("2 soup spoons of starch", "starch"),
        ("Twist of lime peel", "lime peel"), ("1 can your favorite bean soup", "bean soup"),
        ("water to cover", "water"), ("water to thin the pea sauce", "water"),
        ("enough milk to bind", "milk"), ("pastry for double-crust pie", "pastry"),
        ("little almond butter to taste", "almond butter"),
        ("2 little gem lettuces", "little gem lettuces"),
        ("1/2 cup cane sugar not packed", "cane sugar"),
        ("1 tbsp sugar for that sparkle", "sugar"), ("2 cups cheese of choice", "cheese"),
        ("8 oz. ziti or similar pasta", "ziti"), ("1 pkg. any flavor jam", "jam"),
        ("1 kg fruit of your choice", "fruit"), ("1 (8 ounce) wheel Brie", "Brie"),
        ("1 box ready to bake peas", "ready to bake peas"),
    ],
)  # fmt: skip
def test_names_without_measures_and_remarks(line, name):
    assert ingredient_name(line) == name


@pytest.mark.parametrize(
    "name",
    [
        "2-4% sea salt by cabbage weight", "salt (fine", "cups flour", "bottle",
        "Other common seasonings may include cayenne pepper", "sliced and almonds",
        "one two three four five six seven peas", "½ lemon",
        "optionally", "coarslely", "boneless", "fat-free", "Garnish with lime", "Enjoy!", "eggs @",
        '"blops" of cream', "salt + pepper", "pea powder ✨", "cuppeas", "teaspoondill",
        "Grind the peas", "Cover with more leaves", "Preheat oven", "Give yourself plenty of time",
        "any variety", "Other sandwich toppings", "if available", "with lids", "Note", "TIP",
        "Pandan leaves click here", "whatever peas", "pastry bag fitted", "pot with lid",
        "cast-iron skillet", "Oven-safe pan", "wooden chopsticks", "charcoal briquettes",
        "coursely garlic", "freshly Parmesan", "bay leaves no", "dill - a lot", "Cinnamon- ''",
        "Bœuf coupé en cubes de", "bowl add-ins", "Instead of broth", "fresh dill garnish",
        "dill stems removed", "Desired amount of peas",
    ],
)  # fmt: skip
def test_names_that_are_not_only_a_food(name):
    assert not is_clean_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "olive oil", "rib eye steak", "cube steak", "cloves", "leaf lettuce", "pound cake",
        "salt and pepper", "tomater i vann", "sliced almonds", "all-purpose flour", "can-can peas",
        "Podco Light Crème Fraîche", "part skim mozzarella", "cinnamon sticks", "jelly", "barley",
        "all beef hot dogs", "cream of tartar", "cupcakes", "gado-gado",
        "freshly brewed coffee", "lightly salted butter", "red- or white-wine vinegar",
        "whipped topping", "half and half", "fish sticks", "potato", "canola oil",
    ],
)  # fmt: skip
def test_names_that_are_only_a_food(name):
    assert is_clean_name(name)

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.schemas.cleaning import (
    clean_ingredients,
    clean_steps,
    clean_title,
    is_list_in_line,
    is_subheading,
    listed_lines,
)
from toque.cooking.schemas.markup import clean_text


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("plain", "plain"), ("  two   spaces ", "two spaces"),
        ("Mom&#39;s &amp; Dad&amp;#39;s", "Mom's & Dad's"), ("3&#8211;4 cups", "3–4 cups"),
        ("<b>Bake</b> at <a href='x'>350</a>", "Bake at 350"),
        ("1 <sup>1</sup>&frasl;<sub>2</sub> cups", "1 1/2 cups"),
        ("1<sup class='x'>1</sup>/4 oz miso<sup>2</sup>", "1 1/4 oz miso 2"),
        ("Get a pan: ![](./pan.jpg) or ![A pot](pot.jpg)", "Get a pan: or A pot"),
        ("Boil.<br/>Drain.", "Boil.\nDrain."), ("heat if < 5 > 3", "heat if < 5 > 3"),
        ("a\u00a0b\u2009c", "a b c"), ("New Mexico\x96Style", "New Mexico–Style"),
        ("it\x92s\x00 hot\x81", "it's hot"), ("preheat to 350\ufffd\ufffdF.", "preheat to 350°F."),
        ("40\ufffd\ufffd\ufffd50 minutes", "40-50 minutes"),
        ("it\ufffd\ufffd\ufffds done", "it's done"), ("souffl\ufffd\ufffds", "souffls"),
        ("½ cup crème fraîche", "½ cup crème fraîche"), ("cre\u0300me", "crème"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("350&176;F, 350#&176;F, 350&;amp;deg;F, 350&Deg;F", "350°F, 350°F, 350°F, 350°F"),
        ("for hours&151;;at least", "for hours—at least"),
        ("saut& eacute; M&M;s, salt & pepper; R&D", "sauté M&Ms, salt & pepper; R&D"),
        ("souffl&é, pur&eaacute;e, fra&ircirc;che, piment&ocute;n",
        "soufflé, purée, fraîche, pimentón"),
        ('lemon <"">zest<, 4 cups ">stock, 375&def;F', "lemon zest, 4 cups stock, 375°F"),
        ("<1 liter of milk, a -> b", "<1 liter of milk, a -> b"),
        ("lone \ud800 surrogate", "lone surrogate"), ("one\r\ntwo\rthree", "one\ntwo\nthree"),
    ],
)  # fmt: skip
def test_texts(dirty, clean):
    assert clean_text(dirty, Counter()) == clean


@pytest.mark.parametrize(
    "text",
    [
        "نخودفرنگی را می\u200cپزیم",  # Persian: a non-joiner within a verb
        "क्\u200dष",  # Devanagari: a half letter
        "ඩ්\u200dරයි",  # Sinhala
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family
        "\u2764\ufe0f\u200d\U0001f525",  # a heart on fire, in its full form
    ],
)
def test_joiners_that_spell_a_word_or_an_emoji_stay(text):
    notes = Counter()
    assert clean_text(text, notes) == text
    assert notes["texts with invisible characters"] == 0


@pytest.mark.parametrize(
    "sign", ["\u200c", "\u200d", "\u200b", "\u00ad", "\ufeff", "\u200e"]
)
def test_other_invisible_characters_go_and_are_counted(sign):
    notes = Counter()
    assert clean_text(f"choco{sign}late", notes) == "chocolate"
    assert notes["texts with invisible characters"] == 1


@given(st.text())
def test_a_clean_text_stays_and_can_be_written(text):
    once = clean_text(text, Counter())
    assert once == once.strip()
    assert "\ufffd" not in once
    once.encode("utf-8")


def test_repairs_are_counted():
    notes = Counter()
    for text in ("a &amp; b", "<i>a</i>", "a\x00", "a\ufffd"):
        clean_text(text, notes)
    repairs = (
        "HTML entities decoded",
        "HTML tags removed",
        "texts with control characters",
    )
    assert +notes == dict.fromkeys((*repairs, "texts with lost characters (U+FFFD)"), 1)


def test_half_a_character_is_counted_as_lost():
    assert clean_text("beans \ud83c and", notes := Counter()) == "beans and"
    assert +notes == {"texts with lost characters (U+FFFD)": 1}


@pytest.mark.parametrize("separator", list("\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029"))
def test_separators_are_line_breaks(separator):
    assert clean_text(f"2 eggs{separator}1 onion", Counter()) == "2 eggs\n1 onion"


def test_ingredients_lose_bullets_and_subheadings():
    notes = Counter()
    lines = clean_ingredients(
        ["For the sauce:", "- 1 cup cream", "", "Filling:", "• 2 eggs", "***", "FOR THE CRUST",
         "For garnish: dill", "1 cup milk\n2 tbsp oil", "For frying"],
        notes,
    )  # fmt: skip
    assert lines == ("1 cup cream", "2 eggs", "For garnish: dill", "1 cup milk", "2 tbsp oil",
                     "For frying")  # fmt: skip
    assert notes["ingredient sub-headings"] == 3
    assert notes["ingredient lines without a word"] == 1


@pytest.mark.parametrize(
    ("line", "clean", "note"),
    [
        ("1 pork loin (about", "1 pork loin", "brackets"),
        ("10 oz peas ((1 cup), chopped)", "10 oz peas (1 cup, chopped)", "brackets"),
        ("1 cup stock (such as Pod,", "1 cup stock (such as Pod)", "brackets"),
        ("2 cups peas, 1 pound)", "2 cups peas, 1 pound", "brackets"),
        ("butter, (softened (close to", "butter", "brackets"),
        ("dill to garnish, (optional to garnish)", "dill to garnish", "brackets"),
        ("2 peas (1 cup (8 oz), drained)", "2 peas (1 cup, drained)", "brackets"),
        ("1 pea (soft) (2 oz)", "1 pea (soft) (2 oz)", ""),
        ("cup sugar", "sugar", "lost their number"), ("2Easy Pastry disks", "2 Easy Pastry disks",
        "spaces"),
        ("Thawed and juice reserved", None, "only name a preparation"), ("peeled",
        None, "preparation"),
        ("5Stir in lime juice, and taste.", None, "steps among"),
        ("1Thickly slice chillies. Grind.", None, "steps among"),
        ("Cut the peas into a bowl.", None, "steps among"),
        ("Cup of Noodles", "Cup of Noodles", ""), ("Cupcakes", "Cupcakes", ""), ("dried mint",
        "dried mint", ""),
        ("Mix of the best greens", "Mix of the best greens", ""), ("cut fruit", "cut fruit", ""),
        ("Heat-treated flour", "Heat-treated flour", ""), ("ground", "ground", ""),
        ("2 peas (1 cup)", "2 peas (1 cup)", ""),
    ],
)  # fmt: skip
def test_ingredient_lines_are_mended_or_go_and_are_counted(line, clean, note):
    notes = Counter()
    assert clean_ingredients([line, "1 egg"], notes) == (
        (clean, "1 egg") if clean else ("1 egg",)
    )
    assert [what for what in notes if note in what] or not note
    assert bool(notes) == bool(note)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Filling:", True), ("For the Dough", True), ("**Dressing:**", True),
        ("1 cup sugar:", False), ("salt", False), ("For serving", False),
        ("forest mushrooms", False),
    ],
)  # fmt: skip
def test_subheadings(line, expected):
    assert is_subheading(line) is expected


def test_steps_lose_numbers_and_join_their_headings():
    notes = Counter()
    steps = clean_steps(
        ["1. Boil water.", "Step 2: Add rice.", "3) Drain.", "STEP 4", "For the sauce:",
         "Melt butter.", "1.5 cups go in.", "10. Serve.", "2 eggs are added.", "(5) Eat."],
        notes,
    )  # fmt: skip
    assert steps == ("Boil water.", "Add rice.", "Drain.", "For the sauce: Melt butter.",
                     "1.5 cups go in.", "Serve.", "2 eggs are added.", "Eat.")  # fmt: skip
    assert notes["step sub-headings joined to their step"] == 1


@pytest.mark.parametrize(
    ("lines", "steps", "note"),
    [
        (["Step 1", "Mix.", "Etape 2:", "Bake.", "METHOD"], ("Mix.", "Bake."), "only say"),
        (["Heat oven to 350F.Butter a pan.Bake until done."],
         ("Heat oven to 350F. Butter a pan. Bake until done.",), "glued"),
        (["UNROLL AND FILL.Ensure it holds."], ("UNROLL AND FILL. Ensure it holds.",), "glued"),
        (["Makes 16Note: when cold, rest."], ("Makes 16. Note: when cold, rest.",), "glued"),
        (["You'll need:", "Boil the peas."], ("Boil the peas.",), "only say"),
        (["You'll need a pot.", "See U.S.A.Today."],
         ("You'll need a pot.", "See U.S.A.Today."), ""),
        (["Add 1.5 cups. See foo.Bar and U.S.A today."],
         ("Add 1.5 cups. See foo. Bar and U.S.A today.",), "glued"),
        (["For aioli:Blend oil.Hint: See pages.use foodista.com", "Cool.Serve/eat. See peas.Com."],
         ("For aioli: Blend oil. Hint: See pages. use foodista.com",
         "Cool. Serve/eat. See peas.Com."),
         "glued"),
        (["Mix.", "2Stir in peas.", "3Purée it.", "4Tbsp oil goes in.", "7Up is added."],
         ("Mix.", "Stir in peas.", "Purée it.", "4Tbsp oil goes in.", "7Up is added."), ""),
        (["Chill. (Can be made a day ahead. Cover.", "Bake (350°F) until done.)"],
         ("Chill. (Can be made a day ahead. Cover.)", "Bake (350°F) until done."), "brackets"),
        (["1. Mix. 2. Bake for 3. Serve"], ("Mix.", "Bake for", "Serve"), "numbered"),
        (["1. Mix 2. eggs and 3) rest"], ("Mix 2. eggs and 3) rest",), ""),
        (["Serve with 2. Then 1. eat."], ("Serve with 2. Then 1. eat.",), ""),
        (["Stir. Method acting is no heading."], ("Stir. Method acting is no heading.",), ""),
    ],
)  # fmt: skip
def test_steps_are_parted_and_bared(lines, steps, note):
    notes = Counter()
    assert clean_steps(lines, notes) == steps
    assert [what for what, count in notes.items() if count and note in what] or not note
    assert bool(sum(notes.values())) == bool(note)


@pytest.mark.parametrize(
    ("title", "clean"),
    [
        ("Skillet Pea Pie Recipe", "Skillet Pea Pie"), ("Grandma's Recipe", "Grandma's Recipe"),
        ("Pea Soup (Copycat)", "Pea Soup"), ("Pea Soup by Ann Pod", "Pea Soup"),
        ("Podco® Pea Dip", "Podco Pea Dip"), ("Death by Chocolate", "Death by Chocolate"),
        ("Pea Cups(Candy)", "Pea Cups (Candy)"), ("Pea Cake(6 Servings)", "Pea Cake"),
        ("green_pea_salad", "green pea salad"), ("Best Pea Pie {Ever}", "Best Pea Pie"),
        ("Pea Pancakes | Pod Kitchen", "Pea Pancakes"), ("Peas a_b c", "Peas a_b c"),
    ],
)  # fmt: skip
def test_the_end_of_a_title_names_no_writer(title, clean):
    assert clean_title(title, Counter()) == clean


def test_numbers_without_a_point_and_a_blank_before_a_stop():
    steps = [
        "1 Boil the peas.",
        "Wait.",
        "2 Mash <b>them</b> .",
        "2 Tablespoons are enough.",
    ]
    right = ("Boil the peas.", "Wait.", "Mash them.", "2 Tablespoons are enough.")
    assert clean_steps([*steps[:3]], Counter()) == right[:3]
    assert clean_steps(steps[3:], Counter()) == right[3:]


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("Oil-", "Oil"), ("Salt- to taste", "Salt - to taste"), ("Dill-1 tsp", "Dill - 1 tsp"),
        ("3 Serve with bread", ""), ("pound peas", "peas"), ("red- or white wine", ""),
        ("polo- nebo plné mléko", ""),
    ],
)  # fmt: skip
def test_stray_hyphens_and_steps_in_lists(line, clean):
    kept = (line,) if line.startswith(("red-", "polo-")) else (clean,) * bool(clean)
    assert clean_ingredients([line], Counter()) == kept


def test_commas_at_the_end_and_glued_headings_of_steps():
    steps = ["FOR THE SAUCEIn a bowl, mix peas,", "Then eat,", "MINTCo leaves"]
    right = ("FOR THE SAUCE: In a bowl, mix peas.", "Then eat.", "MINTCo leaves")
    assert clean_steps(steps, Counter()) == right


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("4 tablespoons ghee –", "4 tablespoons ghee"),
        ("3 tablespoons Curd,", "3 tablespoons Curd"),
        ("1/2 Cinnamon- ‘'", "1/2 Cinnamon"),
        ('1 pan, 8"', '1 pan, 8"'),
        ("1 can peas (drained)", "1 can peas (drained)"),
    ],
)
def test_loose_marks_at_the_end_of_an_ingredient_are_removed(line, clean):
    assert clean_ingredients([line], Counter()) == (clean,)


@pytest.mark.parametrize(
    ("line", "is_list"),
    [
        ("1 large or small banana 1/2 cup of ice 1/2 cup coconut chips 1/2 cup water", True),
        ("1 cup vegetable stock or 1 cup chicken stock or 1 cup of boiling water", False),
        ("1 cup butter plus 2 tablespoons butter for the pan, at room temperature", False),
    ],
)  # fmt: skip
def test_a_list_on_one_line_may_contain_a_choice(line, is_list):
    assert is_list_in_line(line) == is_list


def test_a_heading_is_not_written_twice_before_its_step():
    steps = ["For the dough:", "For the dough : mix peas and flour.", "Bake it."]
    assert clean_steps(steps, Counter()) == (
        "For the dough : mix peas and flour.",
        "Bake it.",
    )


def test_a_number_that_ends_a_remark_is_not_a_step_number():
    steps = ["Heat the oven to 180 °C (gas", "4) and boil the peas.", "1) Eat."]
    assert clean_steps(steps, Counter()) == (
        "Heat the oven to 180 °C (gas 4) and boil the peas.",
        "Eat.",
    )


@pytest.mark.parametrize(
    ("line", "clean"),
    [("1 teaspoon • Coriander", "1 teaspoon Coriander"), ("• 1 pea", "1 pea")],
)
def test_bullets_within_an_ingredient_are_removed(line, clean):
    assert clean_ingredients([line], Counter()) == (clean,)


def test_numbers_glued_to_their_steps_and_long_headings():
    steps = ["1.Boil the peas. 2.Mash them.", "Second Fold (Tri-Fold or Letter Fold):"]
    assert clean_steps([*steps, "Fold the dough."], Counter()) == (
        "Boil the peas.",
        "Mash them.",
        "Second Fold (Tri-Fold or Letter Fold): Fold the dough.",
    )


def test_only_the_list_of_an_article_is_steps():
    notes: Counter[str] = Counter()
    text = "I love peas.\n \tBoil peas.\n \tMash them.\n \tEat.\n\nMore:\n \tPea jam"
    assert listed_lines(text, notes) == " \tBoil peas.\n \tMash them.\n \tEat."
    assert notes.total() == 1
    assert listed_lines("Boil peas.\n \tEat.", notes) == "Boil peas.\n \tEat."

"""Exports of recipe managers: every text is in an example, or its field is named in the report.

The files were written by us from the published descriptions of the formats:

* Mealie: the exporter of its server, a ZIP with recipes/SLUG/SLUG.json
* Tandoor: its default integration, a ZIP with a ZIP for each recipe
* Paprika: a ZIP of JSON files that are compressed with gzip
* Nextcloud Cookbook: folders with schema.org recipes
* Cooklang: https://github.com/cooklang/spec
* Meal-Master: https://wedesoft.de/software/2020/07/07/mealmaster/
* RecipeML: http://www.formatdata.com/recipeml/spec/recipeml-spec-20010408.html
"""

import gzip
import io
import json
import re
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from toque.cooking.schemas.reader import RecipeReader
from toque.sources.layouts import UnknownFormatError
from toque.sources.records import BlockExamples, examples_in
from toque.workflows.configure import configure
from toque.workflows.prepared_store import open_sources


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def read(path: Path) -> tuple[list[BlockExamples], str]:
    """Read all blocks of a source, and the text of all that the user sees of it."""
    (source,) = open_sources(configure(data={"sources": [{"path": str(path)}]}))
    blocks = []
    for file in source.files or ():
        reader = source.readers.get(file.name, source.reader)
        assert isinstance(reader, RecipeReader), file
        blocks += [reader.examples(block) for block in reader.blocks(file.path)]
    shown = []
    for block in blocks:
        shown += [f"{example.prompt}\n{example.target}" for example in block.examples]
        shown += [*block.unused, *block.notes, *block.dropped]
    return blocks, "\n".join(shown).lower()


MEALIE = {
    "id": "0b1c", "name": "Lentil zqtitle Soup", "slug": "lentil-soup", "description": "zqabout",
    "recipe_yield": "4 servings", "total_time": "50 minutes", "prep_time": "20 minutes",
    "org_url": "https://example.org/zqurl", "rating": None, "tags": [{"name": "vegan",
     "slug": "vegan"}],
    "recipe_category": [], "tools": [{"name": "zqtool", "slug": "pot"}],
    "recipe_ingredient": [
        {"title": "For the soup", "note": "rinsed zqnote", "unit": {"name": "cup",
         "abbreviation": "c"},
         "food": {"name": "red lentils", "description": ""}, "quantity": 1.5, "is_food": True,
         "original_text": None, "reference_id": "1"},
        {"title": None, "note": "2 zqcarrots, peeled", "unit": None, "food": None, "quantity": 1.0,
         "is_food": False, "original_text": None, "reference_id": "2"},
    ],
    "recipe_instructions": [
        {"id": "3", "title": "", "text": "Boil the lentils zqfirst for 20 minutes.",
         "ingredient_references": []},
        {"id": "4", "title": "Finish", "text": "Add the carrots and simmer zqsecond until soft."},
    ],
    "notes": [{"title": "Tip", "text": "zqtip keeps for three days"}],
    "comments": [{"text": "zqcomment"}],
}  # fmt: skip
TANDOOR = {
    "name": "Carrot zqtitle Cake", "description": "zqabout", "keywords": [{"name": "cake"}],
    "working_time": 20, "waiting_time": 40, "internal": True, "servings": 12,
    "servings_text": "pieces", "source_url": "", "nutrition": None,
    "steps": [
        {"name": "Dough", "instruction": "Mix the zqfirst flour with the carrots and the eggs.",
         "time": 10, "order": 0, "show_as_header": False,
         "ingredients": [
             {"food": {"name": "flour", "plural_name": None,
              "supermarket_category": {"name": "zqaisle"}},
              "unit": {"name": "g", "plural_name": None, "description": None},
              "amount": 250.0, "note": "zqsifted", "order": 0, "is_header": False,
               "no_amount": False},
             {"food": {"name": "carrots"}, "unit": None, "amount": 3.0, "note": None, "order": 1,
              "is_header": False, "no_amount": False},
             {"food": {"name": "zqeggs"}, "unit": None, "amount": 4.0, "note": "", "order": 2,
              "is_header": False, "no_amount": False}]},
        {"name": "", "instruction": "Bake at 180 C for 40 zqsecond minutes.", "ingredients": [],
         "time": 40, "order": 1, "show_as_header": False},
    ],
}  # fmt: skip
PAPRIKA = {
    "uid": "A1", "name": "Pea zqtitle Risotto", "description": "zqabout", "notes": "zqnote",
    "ingredients": "1 cup zqrice\n2 cups peas\n1 onion, chopped", "servings": "Serves 4",
    "directions": "Fry the onion zqfirst.\n\nAdd the rice and peas and cook for zqsecond minutes.",
    "prep_time": "10 min", "cook_time": "25 min", "total_time": "35 min", "difficulty": "Easy",
    "categories": ["dinner"], "source": "zqsource", "source_url": "https://example.org",
    "nutritional_info": "zqcalories", "rating": 4, "photo": "a.jpg", "photo_data": "zqphoto",
    "image_url": None, "hash": "F0", "created": "2020-01-01 00:00:00", "photos": [],
}  # fmt: skip
NEXTCLOUD = {
    "@context": "http://schema.org", "@type": "Recipe", "id": "17", "name": "Baked zqtitle Apples",
    "description": "zqabout", "url": "", "prepTime": "PT10M", "cookTime": "PT30M",
     "totalTime": "PT40M",
    "recipeCategory": "dessert", "keywords": "apple,quick", "recipeYield": 4, "tool": ["zqtool"],
    "recipeIngredient": ["4 apples", "50 g zqraisins", "2 tbsp honey"],
    "recipeInstructions": ["Core the apples zqfirst and fill them with the raisins.",
                           "Bake for 30 minutes and pour the zqhoney over them."],
    "nutrition": {"@type": "NutritionInformation", "calories": "210 kcal"}, "image": "/x/full.jpg",
}  # fmt: skip
COOKLANG = """\
---
title: Bean zqtitle Chili
servings: 4
tags:
  - dinner
source: zqsource
time required: 40 minutes
introduction: |
  A dish for
  zqlong evenings.
author:
  name: zqauthor
notes: zqown
---

> zqnote: my grandmother made it every week.

= Base

Heat @olive oil{2%tbsp} in a #large zqpot{} and fry @onion{1}(zqchopped) for ~{5%minutes}.

Add @kidney beans{400%g}, @tomatoes{1/2%kg} and @salt. -- zqcomment
Simmer for ~zqsimmer{30%minutes} zqfirst, [- zqblock -] and season with more @salt.

== Serving ==

Serve with @./sauces/zqsalsa{100%g} and @?sour cream{}.
"""
MEALMASTER = """\
A zqbefore letter.

MMMMM----- Recipe via Meal-Master (tm) v8.05

      Title: Cherry zqtitle Pie
 Categories: Dessert, zqcategory
      Yield: 8 servings

MMMMM---------------------------zqdough--------------------------------
    150 g  Butter; soft zqsoft                 3    Eggs
    150 g  Flour                               1 ts Baking powder
MMMMM---------------------------Filling--------------------------------
    370 g  Sour cherries; dripped off (
           -1 zqglass)
  1 1/2 tb Cornflour
      1 c  Cream

  Stir the butter and the eggs zqfirst. Mix in the flour
  and the baking powder. Bake for 15 minutes.

MMMMM---------------------------Filling--------------------------------
  Cook the cherries with the cornflour, pour on the pie, and serve
  with zqcream.

MMMMM

 From zqafter: the list of a club.

-----------------------------  Recipe via Meal-Master v8.02

      Title: Toast
 Categories: Bread
   Servings:  2

      4 sl Bread
      2 T  Butter

  Toast the bread, and spread the butter on the zqbread.

-----
"""
RECIPEML = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE recipeml PUBLIC "-//FormatData//DTD RecipeML 0.5//EN" "recipeml.dtd" [<!ENTITY a "aaaa">]>
<recipeml version="0.5"><menu><head><title>zqmenu</title></head>
<recipe><head><title>Cr&eacute;pes &amp; zqtitle Jam</title><source>zqsource</source>
<categories><cat>dessert</cat><cat>zqcategory</cat></categories><yield>4</yield>
<preptime><time><qty>30</qty><timeunit>minutes</timeunit></time></preptime></head>
<description>zqabout</description>
<ingredients>
<ing-div><title>zqbatter</title>
<ing><amt><qty>250</qty><unit>g</unit></amt><item>flour</item><prep>zqsifted</prep></ing>
<ing><amt><qty><range><q1>2</q1><q2>3</q2></range></qty><size>large</size></amt><item>eggs</item>
</ing>
<ing><amt><qty>500</qty><unit>ml</unit></amt><item>milk</item><alt-ing><item>zqdrink</item>
</alt-ing></ing>
</ing-div>
<ing><amt><qty>1</qty><unit>glass</unit></amt><item>zqjam</item></ing>
</ingredients>
<directions><step>Whisk flour, eggs and milk zqfirst.</step>
<dir-div><title>Baking</title><step>Fry thin cr&#234;pes for 2 zqsecond minutes each.</step>
</dir-div>
</directions><note>zqnote</note></recipe></menu></recipeml>
"""


def write_mealie(path: Path) -> int:
    other = MEALIE | {"name": "Other Soup", "slug": "other-soup"}
    path.write_bytes(
        zipped(
            {
                "recipes/lentil-soup/lentil-soup.json": json.dumps(MEALIE).encode(),
                "recipes/lentil-soup/images/original.webp": b"RIFF" + bytes(99),
                "recipes/other-soup/other-soup.json": json.dumps(other).encode(),
            }
        )
    )
    return 2


def write_tandoor(path: Path) -> int:
    recipe = zipped(
        {"recipe.json": json.dumps(TANDOOR).encode(), "image.png": bytes(9)}
    )
    path.write_bytes(zipped({"Carrot_Cake.zip": recipe}))
    return 1


def write_paprika(path: Path) -> int:
    recipe = gzip.compress(json.dumps(PAPRIKA).encode())
    path.write_bytes(zipped({"Pea Risotto.paprikarecipe": recipe}))
    return 1


def write_nextcloud(path: Path) -> int:
    name = "Recipes/Baked Apples/recipe.json"
    path.write_bytes(
        zipped({name: json.dumps(NEXTCLOUD).encode(), "full.jpg": bytes(9)})
    )
    return 1


def write_cooklang(path: Path) -> int:
    path.write_text(COOKLANG)
    return 1


def write_mealmaster(path: Path) -> int:
    path.write_text(MEALMASTER)
    return 2


def write_recipeml(path: Path) -> int:
    path.write_text(RECIPEML)
    return 1


NAMED: dict[Any, dict[str, str]] = {
    write_mealie: {
        "zqabout": "description", "zqcomment": "comments", "zqtip": "notes", "zqtool": "tools",
        "zqurl": "org_url",
    },
    write_tandoor: {
        "zqabout": "description", "zqaisle": "steps.ingredients.food.supermarket_category",
    },
    write_paprika: {
        "zqabout": "description", "zqcalories": "nutritional_info", "zqnote": "notes",
        "zqphoto": "photo_data", "zqsource": "source",
    },
    write_nextcloud: {"zqabout": "description", "zqtool": "tool"},
    write_cooklang: {
        "zqblock": "comments", "zqcomment": "comments", "zqnote": "notes", "zqsource": "source",
        "zqsimmer": "timers", "zqlong": "introduction", "zqauthor": "author",
        "zqown": "notes (metadata)",
    },
    write_mealmaster: {
        "zqafter": "outside the recipe", "zqcategory": "categories",
        "zqdough": "ingredient sub-headings", "zqbefore": "outside the recipe",
    },
    write_recipeml: {
        "zqabout": "description", "zqbatter": "ingredient sub-headings", "zqcategory": "categories",
        "zqdrink": "ingredients.alt-ing", "zqnote": "note", "zqsource": "source", "zqmenu": "",
    },
}  # fmt: skip
"""Fields of texts that are in no example, and "" for a text that belongs to no recipe."""


@pytest.mark.parametrize("write", NAMED, ids=lambda write: write.__name__[6:])
def test_every_text_is_read_or_its_field_is_named(tmp_path, write):
    path = tmp_path / "export.data"
    n_recipes = write(path)
    blocks, shown = read(path)
    assert sum(block.kept for block in blocks) == n_recipes, shown
    assert Counter(block.read for block in blocks)[0] == 0
    source = {
        write_mealie: json.dumps(MEALIE), write_tandoor: json.dumps(TANDOOR),
        write_paprika: json.dumps(PAPRIKA), write_nextcloud: json.dumps(NEXTCLOUD),
        write_cooklang: COOKLANG, write_mealmaster: MEALMASTER, write_recipeml: RECIPEML,
    }[write]  # fmt: skip
    words = set(re.findall(r"zq\w+", source))
    lost = {word for word in words if word not in shown}
    assert lost == NAMED[write].keys()
    reported = set(shown.splitlines())
    assert {name for name in NAMED[write].values() if name} <= reported


def test_cooklang_becomes_plain_sentences(tmp_path):
    path = tmp_path / "Bean Chili.cook"
    path.write_text(COOKLANG.partition("---\n\n")[2])
    blocks, _ = read(path)
    (example,) = blocks[0].examples
    assert "Bean Chili" in example.prompt
    for line in (
        "- 2 tbsp olive oil", "- 1 onion, zqchopped", "- 400 g kidney beans", "- salt",
        "- sour cream, optional",
    ):  # fmt: skip
        assert line in example.target
    assert "fry onion for 5 minutes" in example.target
    assert "Simmer for 30 minutes zqfirst" in example.target
    assert example.target.count("- salt") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "cp437"])
@pytest.mark.parametrize("title", ["Crème brûlée", "Döner", "Jalapeño Salsa"])
def test_mealmaster_is_decoded_by_its_letters(tmp_path, title, encoding):
    text = MEALMASTER.replace("Cherry zqtitle Pie", title).replace(
        "flour\n", "flour at 180°\n"
    )
    path = tmp_path / "pie.mmf"
    path.write_bytes(text.encode(encoding))
    blocks, _ = read(path)
    first = next(example for block in blocks for example in block.examples)
    assert title in first.prompt
    assert "180°" in first.target
    # The setting has the same result.
    config = configure(data={"sources": [{"path": str(path)}], "encoding": encoding})
    (source,) = open_sources(config, say=lambda _: None)
    block = next(source.reader.blocks(path))
    assert examples_in(block, source.reader).examples[0] == first


def test_mealmaster_columns_and_continued_lines(tmp_path):
    path = tmp_path / "pie.mmf"
    path.write_bytes(MEALMASTER.replace("Cherry", "Crème").encode("cp1252"))
    blocks, _ = read(path)
    first, second = (example for block in blocks for example in block.examples)
    assert "Crème" in first.prompt
    lines = [line for line in first.target.splitlines() if line.startswith("- ")]
    assert lines == [
        "- 150 g Butter, soft zqsoft", "- 150 g Flour", "- 3 Eggs", "- 1 tsp Baking powder",
        "- 370 g Sour cherries, dripped off (1 zqglass)", "- 1 1/2 tbsp Cornflour", "- 1 cup Cream",
    ]  # fmt: skip
    assert "- 4 slice Bread" in second.target
    assert "- 2 tbsp Butter" in second.target
    assert "From" not in first.target


def test_a_table_with_marks_in_its_cells_stays_a_table(tmp_path):
    path = tmp_path / "a.csv"
    steps = "Boil @lentils{200%g} with @carrots{2} for 20 minutes until they are soft."
    path.write_text(
        "title,ingredients,directions\n" + f'Soup,"2 carrots; lentils","{steps}"\n' * 3
    )
    blocks, _ = read(path)
    assert sum(block.read for block in blocks) == 3


def test_cooklang_keeps_amounts_of_repeated_and_named_things(tmp_path):
    path = tmp_path / "St. Louis Ribs.cook"
    path.write_text(
        "Mix @oil/butter{2%tbsp} with @flour{100%g}(sifted) in #bowls{2}.\n\n"
        "Dust with @&flour{50%g}(toasted) and serve with @flour(plain) after an hour.\n"
    )
    blocks, _ = read(path)
    (example,) = blocks[0].examples
    assert "St. Louis Ribs" in example.prompt
    assert "2 tbsp oil/butter" in example.target
    assert "in 2 bowls" in example.target
    assert "flour (50 g, toasted) and serve with flour (plain)" in example.target


def test_mealmaster_keeps_unknown_units_and_texts_before_the_list(tmp_path):
    path = tmp_path / "a.mmf"
    lines = [
        "MMMMM----- Recipe via Meal-Master (tm) v8.05",
        "",
        "      Title: Salad",
        " Categories: Salads",
        "      Yield: 4 servings",
        "",
        " From my zqaunt.",
        "",
        f"{'      2 hd Lettuce':<40}      4    Tomatoes",
        f"{'':<51}-chopped",
        "      1 c  Yoghurt",
        "",
        "  Wash the lettuce.  Mix with the tomatoes and the yoghurt",
        "  1 hour before you serve it.",
        "",
        "MMMMM",
    ]
    path.write_text("\n".join(lines))
    blocks, shown = read(path)
    (example,) = blocks[0].examples
    lines = [line for line in example.target.splitlines() if line.startswith("- ")]
    assert lines == ["- 2 hd Lettuce", "- 1 cup Yoghurt", "- 4 Tomatoes chopped"]
    assert "1 hour before you serve it" in example.target
    assert "outside the recipe" in shown


def test_recipeml_with_comments_and_plain_ingredients(tmp_path):
    path = tmp_path / "a.xml"
    text = RECIPEML.replace("<recipe>", "<!-- <recipe> not --><recipe>")
    text = text.replace(
        "<ing-div>", "<ing>2 cups zqplain oats</ing><ing><amt><qty>1</qty><unit>lb</unit></amt>"
        "<amt><qty>450</qty><unit>g</unit></amt><item>apples</item></ing><ing-div>",
    )  # fmt: skip
    text = text.replace(
        "<note>", "<directions><step>Eat it zqwarm.</step></directions><note>"
    )
    unclosed = "<recipe><head><title>Cut</title></head>"
    path.write_text(text.replace("</menu>", f"{unclosed}</menu>"))
    blocks, shown = read(path)
    assert sum(block.kept for block in blocks) == 1
    assert [*blocks[-1].dropped] == ["damaged XML"]
    for words in ("2 cups zqplain oats", "1 lb / 450 g apples", "eat it zqwarm."):
        assert words in shown, words


@pytest.mark.parametrize(
    "text",
    [
        "@article{smith2020,\n  title = {Soup},\n}\n" * 9,
        "@Timeout{30}\npublic void cook() {\n  stir(1);\n}\n" * 9,
        "@app.get('/soups/{1}')\ndef soup(n):\n    return n\n" * 9,
        "Mail me at cook@soup.example{1} or at the office.\n" * 9,
        "Write to me @home or #soup. See ~/recipes.\n" * 9,
        "@media (max-width: 9em) { p { color: red } }\n" * 9,
    ],
)
def test_other_texts_are_not_cooklang(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    (source,) = open_sources(
        configure(data={"sources": [{"path": str(tmp_path / "a.txt")}]})
    )
    assert not isinstance(source.reader, RecipeReader)


def test_a_damaged_recipe_in_xml_is_dropped_with_its_line(tmp_path):
    path = tmp_path / "a.xml"
    damaged = "<recipe><head></recipe>\n"
    path.write_text(RECIPEML.replace("<recipe>", f"{damaged}<recipe>"))
    blocks, _ = read(path)
    assert blocks[0].dropped == {"damaged XML": [4]}
    assert [block.kept for block in blocks] == [0, 1]


def test_entities_of_a_document_type_are_not_expanded(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text(RECIPEML.replace("zqjam", "&a;"))
    blocks, shown = read(path)
    assert "aaaa" not in shown
    assert blocks[0].dropped or "&a;" in shown


def hostile(text: str, n: int) -> str:
    return f"MMMMM-- Recipe via Meal-Master\nTitle: a\n{text * n}"


@pytest.mark.parametrize(
    "text",
    [
        "<recipeml>" + "<recipe " * 400_000,
        "@a{1} @b{2} " + "[-" * 100_000,
        "@a{1} @b{2} " + "@a" * 100_000,
        "@a{1} @b{2}\n=" + " " * 200_000 + "=x",
        "@a{1} @b{2} @" + "{" * 200_000,
        hostile("MMMMM" + "-" * 9, 200_000),
        hostile(" " * 40, 50_000),
    ],
    ids=range(7),
)
def test_hostile_texts_are_read_in_time_that_grows_with_their_length(tmp_path, text):
    path = tmp_path / "a.data"
    path.write_text(text)
    reader: Any = RecipeReader()
    with suppress(UnknownFormatError):
        for block in reader.blocks(path):
            reader.examples(block)

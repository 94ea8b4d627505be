"""Small dishes of a few ingredients."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def scrambled_eggs(k: Kitchen) -> None:
    """Scrambled eggs with one addition."""
    k.serves(1, 2, 4)
    k.add("2 egg" if k.chance(70) else "3 egg")
    k.group("milk", 0, 1, "1 tbsp milk", "1 tbsp cream", "1 tbsp sour cream")
    k.add("1/8 tsp salt")
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("add", 1, 1, "1/2 cup spinach", "1/4 cup mushrooms, sliced", "1/4 tomato, diced",
            "1 green onion, sliced", "2 tbsp cheddar cheese", "1 tbsp feta cheese",
            "1/2 oz goat cheese", "1 tsp chives, chopped", "1/4 cup ham, diced")
    k.title("Scrambled Eggs with {add}", "{add:one} Scrambled Eggs",
            "Soft Scrambled Eggs with {add}")
    k.tag("breakfast", "eggs")
    k.step("Whisk the {egg, milk, salt} in a bowl.", "Beat the {egg, milk, salt} until smooth.")
    fresh = k.has("spinach", "mushroom", "tomato", "green onion", "ham")
    if fresh:
        k.step("Heat the {fat} in a nonstick skillet over medium heat. Cook the {add} for {min}.",
               "In a nonstick skillet, cook the {add} in the {fat} for {min}.", minutes=(2, 4, 1))
    else:
        k.step("Heat the {fat} in a nonstick skillet over medium-low heat.",
               "Warm the {fat} in a small skillet over low heat.")
    k.step("Pour in the eggs and stir slowly until softly set, about {min}.",
           "Add the eggs and cook, stirring gently, for {min}.", minutes=(2, 4, 1))
    k.step("Serve at once." if fresh else "Stir in the {add} and serve.",
           "Spoon onto plates and serve." if fresh else "Top with the {add} and serve.")


def hummus(k: Kitchen) -> None:
    """Bean dips."""
    k.batch(6, 1.0, 2.0)
    k.group("bean", 1, 1, "1 can chickpeas, drained and rinsed",
            "1 can white beans, drained and rinsed",
            "1 can black beans, drained and rinsed")
    k.group("rich", 1, 1, "1/4 cup tahini", "3 tbsp olive oil", "1/4 cup Greek yogurt")
    k.group("sour", 1, 1, "2 tbsp lemon juice", "2 tbsp lime juice")
    k.add("1 clove garlic, peeled|minced", "1/2 tsp salt")
    k.group("flavor", 0, 2, "1/2 tsp cumin", "1/2 tsp smoked paprika", "1/4 cup cilantro, chopped",
            "1/4 cup parsley, chopped", "1 red bell pepper, roasted", "1 beet, cooked and chopped",
            "1 jalapeno pepper, chopped")
    word = "Hummus" if k.has("chickpea") else "Dip"
    k.title(f"{{bean:one}} {word}",
            *([f"{{flavor:one}} {{bean:one}} {word}" if k.count("flavor") == 1 else
            f"{{bean:one}} {word} with {{flavor}}",
            f"{{bean:one}} {word} with {{flavor}}"] if k.has("flavor") else
            [f"Simple {{bean:one}} {word}", f"{{bean:one}} and {{rich:one}} {word}"]))
    k.tag("dip", "no-cook")
    k.step("Put the {bean, rich, sour, garlic, salt, flavor} in a food processor.",
           "Place the {bean, garlic, flavor} in a food processor with the {rich, sour, salt}."
           if k.has("flavor") else
           "Place the {bean, garlic} in a food processor with the {rich, sour, salt}.")
    k.step("Process until very smooth, {min}, adding a spoonful of water if too thick.",
           "Blend for {min}, scraping down the sides, until smooth.",
           "Pulse, then blend for {min}, until creamy.", minutes=(2, 5, 1))
    k.step("Chill for {min} before serving.", "Spoon into a bowl, rest for {min}, and serve.",
           "Cover and refrigerate for {min}.", minutes=(15, 45, 5))


def fruit_salad(k: Kitchen) -> None:
    """Cut fruit in juice."""
    k.serves(4, 6)
    k.group("fruit", 3, 3, "1/4 cup blueberries", "1/2 cup strawberries, sliced",
            "1/2 banana, sliced",
            "1/2 apple, diced", "1/2 mango, cubed", "1/2 cup pineapple, cubed", "1/2 peach, sliced",
            "1/4 cup raspberries", "1/4 cup cherries, halved", "1/2 pear, diced")
    k.group("juice", 1, 1, "1/2 tbsp lime juice", "1/2 tbsp lemon juice", "1 tbsp orange juice")
    k.group("sweet", 1, 1, "1/2 tbsp honey", "1/2 tbsp maple syrup", "1 tsp sugar")
    k.group("end", 0, 1, "1/2 tbsp mint, chopped", "1 tbsp coconut", "1 tbsp almonds, chopped")
    k.title("Fruit Salad with {fruit}", "Fruit Salad with {juice, sweet}",
            "Fresh Fruit Salad with {end}" if k.has("end") else "Fruit Salad with {sweet}")
    k.tag("dessert", "salad", "no-cook")
    k.step("Stir the {juice, sweet} in a large bowl.", "In a large bowl, whisk the {juice, sweet}.")
    k.step("Add the {fruit} and toss gently.", "Fold in the {fruit}.")
    k.step("Chill for {min}, then top with the {end}." if k.has("end") else
           "Chill for {min} before serving.", minutes=(10, 30, 10))


def garlic_bread(k: Kitchen) -> None:
    """Toasted slices with flavored butter."""
    k.serves(2, 4, 6)
    k.add("2 slice bread")
    k.group("fat", 1, 1, "1 tbsp butter, softened", "1 tbsp olive oil")
    k.add("1/2 clove garlic, minced|grated")
    k.group("herb", 1, 1, "1/2 tbsp parsley, chopped", "1/2 tbsp basil, sliced",
            "1/2 tbsp chives, chopped", "1/4 tsp oregano", "1/8 tsp rosemary")
    k.group("cheese", 0, 1, "1 tbsp Parmesan cheese", "2 tbsp mozzarella cheese",
            "2 tbsp cheddar cheese")
    k.group("spice", 0, 1, "1/16 tsp red pepper flakes", "1/16 tsp salt", "1/8 tsp paprika")
    k.title("Garlic Bread with {herb}", "Garlic and {herb:one} Bread",
            "{cheese:one} Garlic Bread" if k.has("cheese") else "Simple Garlic Bread")
    k.tag("side", "baked")
    preheat(k, 400, 425, "set out a baking sheet")
    k.step("Mix the {fat, garlic, herb, spice} in a small bowl.",
           "Stir the {fat, garlic, herb, spice} together.")
    k.step("Spread over the {bread} and sprinkle with the {cheese}." if k.has("cheese") else
           "Spread over the {bread}.",
           "Brush the {bread} with the mixture and top with the {cheese}."
           if k.has("cheese") else "Brush the {bread} with the mixture.")
    k.step("Bake until crisp and golden, about {min}.", "Bake on the sheet for {min}.",
           minutes=(8, 12, 1))


def baked_potatoes(k: Kitchen) -> None:
    """Whole baked potatoes with a topping."""
    k.serves(2, 4, 6)
    k.group("potato", 1, 1, "1 potato, scrubbed", "1 sweet potato, scrubbed")
    k.add("1/2 tsp olive oil", "1/8 tsp salt")
    k.group("fill", 1, 1, "2 tbsp sour cream", "1/2 tbsp butter", "2 tbsp cheddar cheese",
            "2 tbsp Greek yogurt", "1/4 can black beans, drained and warmed", "1 tbsp feta cheese")
    k.group("top", 1, 1, "1/2 tbsp chives, chopped", "1/2 green onion, sliced", "1 tbsp salsa",
            "1/2 slice bacon, cooked and crumbled", "1/2 tbsp cilantro, chopped",
            "1/16 tsp black pepper", "1/8 tsp smoked paprika")
    k.title("Baked {potato} with {fill}", "Baked {potato} with {fill, top}",
            "Stuffed {potato} with {fill}")
    k.tag("side", "baked")
    preheat(k, 400, 425, "line a baking sheet with foil")
    k.step("Rub the {potato} with the {olive oil, salt} and prick with a fork.",
           "Prick the {potato}, then rub with the {olive oil, salt}.")
    k.step("Bake on the sheet until soft all the way through, about {min}.",
           "Bake for {min}, until a knife slides in easily.", minutes=(45, 60, 5))
    k.step("Split open and fill with the {fill}.",
           "Cut a cross in the top and spoon in the {fill}.")
    k.step("Sprinkle with the {top} and serve.", "Finish with the {top}.")


def guacamole(k: Kitchen) -> None:
    """Avocado dips and fresh salsa."""
    k.serves(2, 4, 6)
    k.add("1/2 avocado, halved and pitted", "1/2 tbsp lime juice" if k.chance(70) else
          "1/2 tbsp lemon juice", "1/8 tsp salt")
    k.call("sour", "lime juice", "lemon juice")
    k.group("onion", 0, 1, "1/8 red onion, finely chopped|minced",
            "1/2 green onion, sliced|chopped",
            "1/4 clove garlic, minced|grated")
    k.group("add", 1, 2, "1/4 tomato, diced|chopped", "1 tbsp cilantro, chopped",
            "1/4 jalapeno pepper, minced|diced", "1/4 mango, diced|chopped", "2 tbsp corn, thawed",
            "1/8 tsp cumin", "1 tbsp feta cheese", "2 tbsp Greek yogurt")
    k.title("Guacamole with {add}", "{add:one} Guacamole" if k.count("add") == 1 else
            "Chunky Guacamole with {add}", "{sour:one} Guacamole with {add}")
    k.tag("dip", "no-cook")
    k.step("Scoop the {avocado} into a bowl and mash with the {sour, salt}.",
           "Mash the {avocado, sour, salt} with a fork, leaving some chunks.",
           "Put the {avocado, sour, salt} in a bowl and crush with a fork.")
    k.step("Stir in the {onion, add}." if k.has("onion") else "Stir in the {add}.",
           "Fold in the {onion, add}." if k.has("onion") else "Fold in the {add}.")
    k.step("Let stand for {min}, then serve.", "Cover, chill for {min}, and serve.",
           "Rest for {min} before serving.", minutes=(5, 30, 5))


def glazed_vegetables(k: Kitchen) -> None:
    """Vegetables cooked in a pan with butter and something sweet or sharp."""
    k.serves(2, 4, 6)
    k.group("veg", 1, 1, "1 carrot, sliced", "1 cup green beans, trimmed", "1 cup snow peas",
            "1 cup asparagus, trimmed", "3/4 cup peas", "1 cup broccoli, cut into florets",
            "1 cup cabbage, sliced", "2 cup spinach", "1 cup mushrooms, halved")
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil", "1/2 tsp sesame oil")
    k.group("glaze", 1, 1, "1/2 tbsp honey", "1/2 tbsp maple syrup", "1 tsp brown sugar",
            "1 tsp soy sauce", "1 tsp balsamic vinegar", "1 tsp lemon juice")
    k.add("1/8 tsp salt" if not k.has("soy sauce") else "1/16 tsp black pepper")
    k.call("season", "salt", "black pepper")
    k.group("end", 1, 1, "1/2 tbsp parsley, chopped", "1/2 tbsp sesame seeds",
            "1/2 clove garlic, minced",
            "1/2 tbsp dill, chopped", "1 tbsp almonds, sliced", "1/2 tsp ginger, grated")
    k.title("{glaze:one} Glazed {veg}" if not k.has("soy sauce", "lemon juice") else
            "{veg} with {glaze}", "{veg} with {glaze, end}", "{fat:one} {veg} with {end}")
    k.tag("side")
    k.step("Heat the {fat} in a large skillet over medium heat.",
           "Warm the {fat} in a wide pan over medium heat.")
    time = (8, 10, 1) if k.has("carrot", "cabbage") else (2, 3, 1) if k.has("spinach") else (4, 7,
                                                                                             1)
    if k.has("garlic", "ginger"):
        k.step("Add the {veg, end} and cook, stirring, for {min}.",
               "Cook the {veg, end} until just tender, {min}.", minutes=time)
        k.step("Stir in the {glaze, season} and serve.", "Toss with the {glaze, season}.")
        return
    k.step("Add the {veg} and cook, stirring, until just tender, {min}.",
           "Cook the {veg} for {min}, stirring now and then.", minutes=time)
    k.step("Stir in the {glaze, season} and cook for 1 minute.", "Toss with the {glaze, season}.")
    k.step("Sprinkle with the {end} and serve.", "Serve hot, topped with the {end}.")


def roasted_nuts(k: Kitchen) -> None:
    """Nuts or chickpeas roasted with spice."""
    k.batch(8, 1.0, 2.0)
    k.group("nut", 1, 2, "1 cup almonds", "1 cup walnuts", "1 cup pecans", "1 cup peanuts",
            "1 cup pumpkin seeds")
    k.group("bind", 1, 1, "1 tbsp olive oil", "1 tbsp butter, melted", "2 tbsp maple syrup",
            "2 tbsp honey")
    k.group("spice", 1, 2, "1 tsp smoked paprika", "1 tsp cinnamon", "1/2 tsp cumin",
            "1/2 tsp rosemary",
            "1 tsp chili powder", "1 tsp curry powder", "1 tbsp brown sugar")
    k.add("1/2 tsp salt")
    k.title("Roasted {nut} with {spice}", "{spice:one} Roasted {nut}" if k.count("spice") == 1 else
            "Spiced {nut}", "{bind:one} Roasted {nut}")
    k.tag("snack", "baked")
    preheat(k, 325, 350, "line a baking sheet with parchment paper")
    k.step("Toss the {nut} with the {bind, spice, salt}.",
           "In a bowl, stir the {nut, bind, spice, salt} until coated.")
    k.step("Spread on the sheet and roast, stirring once, for {min}.",
           "Roast on the sheet until fragrant and golden, {min}.", minutes=(10, 16, 1))
    k.step("Cool completely before serving.", "Let cool on the sheet; they crisp as they cool.")


FAMILIES: tuple[Family, ...] = (
    scrambled_eggs,
    hummus,
    fruit_salad,
    garlic_bread,
    baked_potatoes,
    guacamole,
    glazed_vegetables,
    roasted_nuts,
)

"""Pasta and noodles."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import (
    bloom,
    boil_pasta,
    pasta_water,
    preheat,
    soften,
)
from toque.cooking.cookbook.recipe_builder import Family, Kitchen

_SHAPES = ("3 oz spaghetti", "3 oz penne", "3 oz rigatoni", "3 oz fettuccine")


def tomato_pasta(k: Kitchen) -> None:
    """Pasta with a tomato sauce, with or without meat."""
    k.serves(4, 8)
    k.group("pasta", 1, 1, *_SHAPES)
    pasta_water(k)
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped|diced", "1/2 clove garlic, minced|sliced")
    k.group("meat", 0, 1, "1/4 lb ground beef", "1/4 lb Italian sausage", "1/4 lb ground turkey")
    if not k.has("meat"):
        k.group("veg", 1, 2, "1/2 zucchini, diced", "1/2 cup mushrooms, sliced",
                "1/4 eggplant, diced", "1/4 red bell pepper, diced", "1 tbsp olives")
    k.add("1/4 can crushed tomatoes")
    k.group("herb", 1, 1, "1/4 tsp oregano", "1/4 tsp thyme", "1 tbsp basil, torn")
    k.group("heat", 1, 1, "1/16 tsp red pepper flakes", "1/16 tsp black pepper")
    k.add("1 tbsp Parmesan cheese")
    k.title(*(["{pasta} with {meat} Sauce", "{pasta} with Tomato and {meat} Sauce",
               "Weeknight {pasta} with {meat}"] if k.has("meat") else
              ["{pasta} with Tomatoes and {veg}", "{pasta} with {veg} in Tomato Sauce",
               "{veg:one} {pasta}" if k.count("veg") == 1 else "{pasta} with {veg}"]))
    k.tag("pasta")
    pan = k.pick("a large skillet", "a wide pan", "a deep skillet")
    if k.has("meat"):
        k.step(f"Heat the {{olive oil}} in {pan} over medium-high heat and brown the {{meat, "
               f"onion}} for {{min}}.",
               f"In {pan}, cook the {{onion, meat}} in the {{olive oil}} until browned, {{min}}.",
               minutes=(7, 9, 1))
    else:
        soften(k, pan, "olive oil", "onion", "veg")
    bloom(k, "garlic", "heat")
    k.step("Add the {crushed tomato, herb} and simmer for {min}.",
           "Stir in the {crushed tomato, herb} and simmer until thick, {min}.",
           minutes=(15, 25, 5))
    boil_pasta(k)
    k.step("Toss the {pasta} with the sauce and top with the {Parmesan cheese}.",
           "Stir the {pasta} into the sauce and serve with the {Parmesan cheese}.",
           "Mix the {pasta} and sauce, sprinkle with the {Parmesan cheese}, and serve.")


def creamy_pasta(k: Kitchen) -> None:
    """Pasta in a cream and cheese sauce."""
    k.serves(2, 4, 6)
    k.group("pasta", 1, 1, *_SHAPES)
    pasta_water(k)
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("main", 1, 1, "1 cup mushrooms, sliced", "1/4 lb chicken breasts, cut into strips",
            "1/4 lb shrimp", "1/2 cup asparagus, cut up", "1/2 cup broccoli, cut into florets",
            "3/2 slice bacon, chopped", "1/2 cup peas")
    k.add("1/2 clove garlic, minced")
    k.group("cream", 1, 1, "1/4 cup cream", "2 tbsp cream cheese", "1/4 cup ricotta cheese")
    k.add("2 tbsp Parmesan cheese")
    k.group("last", 1, 1, "1/2 tsp lemon zest", "1/16 tsp nutmeg", "1 tbsp parsley, chopped",
            "1/2 cup spinach", "1 tbsp basil, torn")
    k.add("1/8 tsp black pepper")
    k.title("Creamy {pasta} with {main}", "{main:one} {pasta} with {last}",
            "{pasta} with {main, last}", "Creamy {main:one} {pasta}")
    k.tag("pasta")
    boil_pasta(k)
    done = ("until pink" if k.has("shrimp") else
            "until cooked through" if k.has("chicken breast") else
            "until crisp" if k.has("bacon") else "until tender")
    k.step(f"Meanwhile, heat the {{fat}} in a large skillet over medium heat. Cook the {{main}} "
           f"{done}, about {{min}}.",
           f"In a skillet, cook the {{main}} in the {{fat}} over medium heat {done}, {{min}}.",
           minutes=(4, 5, 1) if k.has("shrimp", "pea") else (6, 8, 1))
    k.step("Add the {garlic, black pepper} and cook for 1 minute.",
           "Stir in the {garlic, black pepper} and cook for 1 minute more.")
    k.step("Stir in the {cream, Parmesan cheese} and simmer for {min}, until smooth.",
           "Add the {cream, Parmesan cheese} and stir over low heat for {min}.",
           minutes=(2, 4, 1))
    k.step("Toss in the {pasta, last} and serve at once.",
           "Add the {pasta, last}, toss well, and serve.")


def pesto_pasta(k: Kitchen) -> None:
    """Pasta with a pounded or bought green sauce."""
    k.serves(2, 4, 6)
    k.group("pasta", 1, 1, *_SHAPES)
    pasta_water(k)
    if own := k.chance(50):
        k.group("leaf", 1, 1, "1/2 cup basil", "1/2 cup arugula", "1/2 cup spinach")
        k.group("nut", 1, 1, "1 tbsp walnuts", "1 tbsp almonds", "1 tbsp pumpkin seeds")
        k.add("1/2 clove garlic", "1 tbsp Parmesan cheese", "1 tbsp olive oil")
    else:
        k.add("2 tbsp pesto")
    k.group("veg", 1, 2, "1/2 cup cherry tomatoes, halved", "1/4 cup peas", "1/2 cup green beans",
            "1 tbsp olives", "1/4 cup corn")
    k.add("1 tsp lemon juice", "1/16 tsp black pepper")
    k.title("{pasta} with {leaf:one} Pesto and {veg:one}" if own and k.count("veg") == 1 else
            "Pesto {pasta} with {veg}",
            "{leaf:one} and {nut:one} Pesto {pasta}" if own else "Pesto {pasta} with {veg}")
    k.tag("pasta")
    if own:
        k.step("Blend the {leaf, nut, garlic, Parmesan cheese, olive oil} to a coarse paste.",
               "Pulse the {leaf, nut, garlic, Parmesan cheese, olive oil} in a food processor "
               "until nearly smooth.")
    boil_pasta(k)
    if k.has("pea", "green bean", "corn"):
        k.call("hot", "pea", "green bean", "corn")
        k.step("Cook the {hot} in a little boiling water for {min} and drain.",
               "Steam the {hot} for {min}, until just tender.", minutes=(3, 5, 1))
    sauce = "green paste" if own else "{pesto}"
    k.step(f"Toss the {{pasta}} with the {sauce} and {{lemon juice}}.",
           f"Mix the {{pasta}} with the {sauce} and {{lemon juice}}.")
    k.step("Fold in the {veg}, season with the {black pepper}, and serve.",
           "Add the {veg, black pepper}, toss again, and serve warm or cold.")


def macaroni_and_cheese(k: Kitchen) -> None:
    """Baked macaroni in cheese sauce."""
    k.serves(4, 6, 8)
    k.add("1/2 cup macaroni")
    k.add("2 cup water", eaten=0.15)
    k.add("3/4 tbsp butter", "3/4 tbsp flour", "1/2 cup milk")
    k.group("cheese", 1, 2, "1/3 cup cheddar cheese", "1/4 cup Swiss cheese",
            "1/3 cup mozzarella cheese")
    k.group("spice", 1, 1, "1/4 tsp Dijon mustard", "1/8 tsp paprika", "1/16 tsp nutmeg",
            "1/8 tsp smoked paprika")
    k.group("extra", 0, 1, "1/4 cup broccoli, chopped", "1/4 cup cauliflower, chopped",
            "1/4 cup ham, diced", "1/4 cup peas")
    k.add("1/8 tsp salt", "2 tbsp bread crumbs")
    k.title("Baked Macaroni and Cheese", "Macaroni with {cheese}",
            *(["Macaroni and Cheese with {extra}"] * 2 if k.has("extra") else
              ["{cheese:one} Macaroni Bake"]))
    k.tag("pasta", "baked")
    preheat(k, 350, 375, "grease a baking dish")
    k.call("boiled", "macaroni", "broccoli", "cauliflower", "pea")
    k.step("Boil the {water} in a large pot, cook the {boiled} for {min}, and drain.",
           "Bring the {water} to a boil and cook the {boiled} for {min}. Drain well.",
           minutes=(7, 8, 1))
    k.step("Melt the {butter} in a saucepan, stir in the {flour}, and cook for {min}.",
           "In a saucepan, cook the {butter, flour} over medium heat for {min}, stirring.",
           minutes=(1, 2, 1))
    k.step("Whisk in the {milk} and simmer until thick, {min}.",
           "Slowly whisk in the {milk} and cook for {min}, until thickened.", minutes=(4, 6, 1))
    k.step("Off the heat, stir in the {cheese, spice, salt} until melted.",
           "Remove from the heat and stir in the {cheese, spice, salt}.")
    k.step("Fold the {macaroni, extra} into the sauce, spoon into the dish, and top with the "
           "{bread crumb}.",
           "Mix the sauce with the {macaroni, extra}. Transfer to the dish and sprinkle with the "
           "{bread crumb}.")
    k.step("Bake until golden and bubbling, about {min}.", "Bake for {min}, until golden on top.",
           minutes=(20, 30, 5))


def lasagna(k: Kitchen) -> None:
    """Layers of noodles, sauce and cheese."""
    k.serves(6, 8)
    k.add("1/2 tbsp olive oil", "1/8 onion, chopped", "1/3 clove garlic, minced")
    k.group("fill", 1, 1, "2 oz ground beef", "2 oz Italian sausage", "1/2 cup mushrooms, sliced",
            "1/2 zucchini, sliced", "1/2 cup spinach, chopped")
    k.add("1/8 can crushed tomatoes", "1/8 tsp oregano")
    k.add("1/3 cup ricotta cheese", "1/8 egg", "1/16 tsp black pepper", "3/2 lasagna noodle",
          "1/3 cup mozzarella cheese", "1 tbsp Parmesan cheese")
    k.title("{fill:one} Lasagna", "Lasagna with {fill}", "Classic {fill:one} Lasagna",
            "{fill:one} and Ricotta Cheese Lasagna")
    k.tag("pasta", "baked")
    preheat(k, 350, 375, "lightly oil a deep baking dish")
    k.step("Heat the {olive oil} in a skillet and cook the {onion, fill} for {min}.",
           "In a skillet, cook the {onion, fill} in the {olive oil} until done, about {min}.",
           minutes=(7, 9, 1))
    k.step("Add the {garlic, crushed tomato, oregano} and simmer for {min}.",
           "Stir in the {garlic, crushed tomato, oregano}. Simmer for {min}.", minutes=(15, 20, 5))
    k.step("Mix the {ricotta cheese, egg, black pepper} in a bowl.",
           "In a bowl, stir together the {ricotta cheese, egg, black pepper}.")
    k.step("Cook the {lasagna noodle} in boiling water for {min} and drain.",
           "Boil the {lasagna noodle} until flexible, {min}, and drain.", minutes=(8, 10, 1))
    k.step("Layer the sauce, {lasagna noodle}, the ricotta mixture, and the {mozzarella cheese} in "
           "the dish, twice.",
           "Spread some sauce in the dish. Layer the {lasagna noodle} with the ricotta mixture, "
           "sauce, and {mozzarella cheese}.")
    k.step("Sprinkle with the {Parmesan cheese} and bake for {min}.",
           "Top with the {Parmesan cheese} and bake until bubbling, {min}.", minutes=(35, 45, 5))
    k.step("Let stand for 10 minutes, then cut and serve.",
           "Rest for 10 minutes before cutting.", minutes=10)


def stir_fried_noodles(k: Kitchen) -> None:
    """Noodles tossed with vegetables and soy sauce."""
    k.serves(2, 4)
    k.group("noodle", 1, 1, "2 oz rice noodles", "3 oz spaghetti", "1 cup egg noodles")
    k.add("1 tbsp soy sauce", "1/2 tbsp rice vinegar")
    k.group("sweet", 1, 1, "1/2 tbsp honey", "1/2 tbsp brown sugar", "1/2 tbsp maple syrup")
    k.add("1/2 tbsp vegetable oil")
    k.group("main", 1, 1, "1/4 lb tofu, cubed", "1/4 lb chicken breasts, thinly sliced",
            "1/4 lb shrimp", "1/4 lb beef sirloin, thinly sliced",
            "1/4 lb pork tenderloin, thinly sliced")
    k.group("veg", 2, 3, "1/2 carrot, cut into thin strips", "1/4 red bell pepper, sliced",
            "1/2 cup cabbage, shredded", "1/2 cup broccoli, cut into florets",
            "1/3 cup snow peas", "1/2 cup mushrooms, sliced")
    k.add("1/2 clove garlic, minced", "1/2 tsp ginger, grated|minced")
    k.group("top", 1, 1, "1 tbsp peanuts, chopped", "1/2 tbsp sesame seeds",
            "1 green onion, sliced", "1 tbsp cilantro, chopped")
    k.title("{main:one} Stir-Fried Noodles", "{noodle} with {main, top}",
            "Stir-Fried {noodle} with {veg}", "{main:one} Noodles with {top}")
    k.tag("noodles")
    k.step("Cook the {noodle} in boiling water until tender, about {min}, then drain.",
           "Boil the {noodle} for {min}, drain, and rinse with cold water.", minutes=(6, 9, 1))
    k.step("Stir the {soy sauce, rice vinegar, sweet} together in a small bowl.",
           "Whisk the {soy sauce, rice vinegar, sweet} in a cup.")
    k.step("Heat the {vegetable oil} in a wok over high heat and stir-fry the {main} for {min}.",
           "In a large skillet, cook the {main} in the {vegetable oil} over high heat, {min}.",
           minutes=(3, 4, 1) if k.has("shrimp", "beef sirloin") else (5, 6, 1))
    k.step("Add the {veg, garlic, ginger} and stir-fry for {min}.",
           "Toss in the {veg, garlic, ginger} and cook until crisp-tender, {min}.",
           minutes=(3, 5, 1))
    k.step("Add the {noodle} and sauce, toss for 1 minute, and top with the {top}.",
           "Toss with the {noodle} and sauce until hot. Serve with the {top}.", minutes=1)


FAMILIES: tuple[Family, ...] = (
    tomato_pasta,
    creamy_pasta,
    pesto_pasta,
    macaroni_and_cheese,
    lasagna,
    stir_fried_noodles,
)

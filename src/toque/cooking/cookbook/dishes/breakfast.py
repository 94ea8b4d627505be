"""Eggs, oats, smoothies and pancakes."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def omelette(k: Kitchen) -> None:
    """A folded omelette for one or two."""
    k.serves(1, 2)
    k.add("3 egg" if k.chance(40) else "2 egg")
    k.add("1 tbsp milk" if k.chance(50) else "1 tbsp water")
    k.call("wet", "milk", "water")
    k.add("1/8 tsp salt", "1/8 tsp black pepper")
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("fill", 1, 2, "1/4 cup mushrooms, sliced", "1/2 cup spinach", "1/4 tomato, diced",
            "1/4 cup ham, diced", "1/4 green bell pepper, diced", "1 green onion, sliced",
            "1/4 zucchini, diced")
    k.group("cheese", 1, 1, "2 tbsp cheddar cheese", "1 tbsp feta cheese", "1/2 oz goat cheese",
            "2 tbsp Swiss cheese", "1 tbsp Parmesan cheese")
    k.group("herb", 0, 1, "1 tsp chives, chopped", "1 tsp parsley, chopped", "1 tsp dill, chopped")
    k.title("{fill:one} and {cheese:one} Omelette" if k.count("fill") == 1 else
            "Omelette with {fill}", "{cheese:one} Omelette with {fill}",
            "Omelette with {fill, cheese}")
    k.tag("breakfast", "eggs")
    k.step("Beat the {egg} with the {wet, salt, black pepper}.",
           "Whisk the {egg, wet, salt, black pepper} in a bowl.")
    k.step("Heat half of the {fat} in a nonstick skillet and cook the {fill} for {min}. Set aside.",
           "In a nonstick skillet, cook the {fill} in half of the {fat} for {min}, then remove.",
           minutes=(2, 4, 1))
    k.step("Add the rest of the {fat}, pour in the eggs, and cook until almost set, {min}.",
           "Heat the remaining {fat}, add the eggs, and cook over medium heat for {min}.",
           minutes=(2, 3, 1))
    k.step("Spoon the {fill, cheese} over one half and fold.",
           "Cover one half with the {fill, cheese}, then fold the other half over.")
    k.step("Slide onto a plate and sprinkle with the {herb}." if k.has("herb") else
           "Slide onto a plate and serve.")


def frittata(k: Kitchen) -> None:
    """Eggs and vegetables finished in the oven."""
    k.serves(4, 6)
    k.add("3/2 egg", "1 tbsp milk", "1/8 tsp salt", "1/16 tsp black pepper")
    k.group("cheese", 1, 1, "2 tbsp cheddar cheese", "1 tbsp Parmesan cheese", "1 tbsp feta cheese",
            "1/2 oz goat cheese", "2 tbsp Swiss cheese")
    k.add("1/2 tbsp olive oil")
    k.group("veg", 2, 3, "1/4 zucchini, sliced", "1/8 onion, chopped", "1/2 potato, thinly sliced",
            "1/4 red bell pepper, chopped", "1/4 cup mushrooms, sliced", "1/2 cup spinach",
            "1/4 cup asparagus, cut up", "1/4 cup broccoli, chopped")
    k.group("herb", 1, 1, "1 tsp chives, chopped", "1 tsp dill, chopped", "1/2 tbsp basil, sliced",
            "1/2 tbsp parsley, chopped")
    k.title("{veg:one} Frittata" if k.count("veg") == 2 else "Garden Frittata with {cheese}",
            "Frittata with {veg}", "{cheese:one} and {herb:one} Frittata",
            "{veg:one} Frittata with "
            "{cheese}" if k.count("veg") == 2 else "Frittata with {veg}")
    k.tag("breakfast", "eggs", "baked")
    preheat(k, 350, 400, "set out an ovenproof skillet")
    k.step("Whisk the {egg, milk, salt, black pepper}, and stir in the {cheese}.",
           "Beat the {egg, milk, salt, black pepper, cheese} together.")
    k.step("Heat the {olive oil} in the skillet over medium heat and cook the {veg} until tender, "
           "{min}.",
           "In the skillet, cook the {veg} in the {olive oil} for {min}.",
           minutes=(9, 12, 1) if k.has("potato") else (5, 8, 1))
    k.step("Pour in the eggs and cook for {min} without stirring.",
           "Add the egg mixture and cook until the edges set, {min}.", minutes=(2, 4, 1))
    k.step("Bake until just set in the middle, about {min}.",
           "Move to the oven and bake for {min}.", minutes=(10, 15, 1))
    k.step("Sprinkle with the {herb} and cut into wedges.",
           "Top with the {herb}, slice, and serve warm.")


def pancakes(k: Kitchen) -> None:
    """Pancakes with fruit or spice in the batter."""
    k.batch(4, 1.0, 1.5, 2.0)
    k.group("flour", 1, 1, "3/2 cup flour", "3/2 cup whole wheat flour")
    k.group("sweet", 1, 1, "2 tbsp sugar", "2 tbsp brown sugar", "2 tbsp honey",
            "2 tbsp maple syrup")
    k.add("2 tsp baking powder", "1/4 tsp salt")
    k.group("spice", 0, 1, "1/2 tsp cinnamon", "1/4 tsp nutmeg", "1 tsp lemon zest")
    k.group("milk", 1, 1, "5/4 cup milk", "5/4 cup buttermilk")
    k.add("1 egg" if k.chance(60) else "2 egg", "3 tbsp butter, melted")
    k.group("add", 0, 1, "3/4 cup blueberries", "3/4 cup raspberries", "1 banana, sliced",
            "1/2 cup chocolate chips", "1 apple, grated", "1/2 cup walnuts, chopped")
    k.group("serve", 0, 1, "1 cup strawberries, sliced", "1/2 cup Greek yogurt",
            "1/2 cup peaches, sliced")
    k.call("dry", "sugar", "brown sugar", "baking powder", "salt", "cinnamon", "nutmeg")
    k.call("wet", "milk", "buttermilk", "egg", "honey", "maple syrup", "lemon zest")
    grain = "Whole Wheat " if k.has("whole wheat flour") else ""
    milk = "Buttermilk " if k.has("buttermilk") else ""
    k.title(*([f"{{add:one}} {milk}Pancakes", f"{grain}{{add:one}} Pancakes"] if k.has("add") else
              [f"{milk}{grain}Pancakes", f"Fluffy {grain}Pancakes"]),
            *([f"{grain}Pancakes with {{serve}}"] if k.has("serve") else []),
            *([f"{{spice:one}} {grain}Pancakes"] if k.has("spice") else []))
    k.tag("breakfast")
    k.step("Whisk the {flour, dry} in a bowl.", "In a large bowl, stir together the {flour, dry}.",
           "Mix the {flour, dry}.")
    k.step("Beat the {wet} with half of the {butter}, pour over the dry mixture, and stir until "
           "just combined.",
           "Stir in half of the {butter} and the {wet}; a few lumps are fine.")
    if k.has("add"):
        k.step("Fold in the {add}.", "Gently stir in the {add}.")
    k.step("Brush a hot skillet with butter and pour in 1/4 cup of batter for each pancake.",
           "Heat a little of the butter in a skillet and ladle in 1/4 cup of batter at a time.")
    k.step("Cook until bubbles form, about {min}, then flip and brown the other side.",
           "Cook for {min} on each side, until golden.", minutes=(2, 3, 1))
    if k.has("serve"):
        k.step("Serve warm with the {serve}.", "Stack and top with the {serve}.")


def oatmeal(k: Kitchen) -> None:
    """Oats cooked in milk, or soaked overnight."""
    k.serves(1, 2, 4)
    k.add("1/2 cup oats")
    soaked = k.chance(45)
    if not soaked:
        k.group("milk", 1, 1, "1 cup milk", "1 cup water")
    else:
        k.group("milk", 1, 1, "1/2 cup milk", "1/2 cup coconut milk", "1/2 cup buttermilk")
        k.group("thick", 1, 1, "1/4 cup Greek yogurt", "1 tbsp chia seeds", "1/4 cup yogurt")
    k.add("1 pinch salt")
    k.group("sweet", 1, 1, "1/2 tbsp honey", "1/2 tbsp maple syrup", "1/2 tbsp brown sugar")
    k.group("spice", 0, 1, "1/4 tsp cinnamon", "1/4 tsp vanilla extract", "1/8 tsp nutmeg")
    k.group("fruit", 1, 1, "1/2 banana, sliced", "1/4 cup blueberries", "1/4 cup raspberries",
            "1/2 apple, diced", "1/2 pear, diced", "1/2 peach, sliced",
            "1/4 cup strawberries, sliced",
            "2 tbsp raisins")
    k.group("top", 1, 1, "1 tbsp walnuts, chopped", "1 tbsp almonds, chopped",
            "1/2 tbsp peanut butter", "1 tbsp pecans, chopped", "1 tbsp coconut",
            "1/2 tbsp pumpkin seeds")
    k.title(*(["{fruit:one} Overnight Oats", "Overnight Oats with {fruit, top}",
               "{fruit:one} and {top:one} Overnight Oats"] if soaked else
              ["{fruit:one} Oatmeal", "Oatmeal with {fruit, top}",
               "{fruit:one} and {top:one} Oatmeal"]))
    k.tag("breakfast")
    if soaked:
        k.step("Stir the {oat, milk, thick, salt, sweet, spice} in a jar.",
               "In a bowl or jar, mix the {oat, milk, thick, salt, sweet, spice}.")
        k.step("Cover and refrigerate overnight.", "Chill, covered, for at least 6 hours.",
               minutes=480)
        k.step("Stir, then top with the {fruit, top}.", "Serve cold with the {fruit, top}.")
        return
    k.step("Bring the {milk, salt} to a simmer in a small saucepan.",
           "Heat the {milk} with the {salt} until steaming.")
    k.step("Stir in the {oat, spice} and cook over low heat, stirring, for {min}.",
           "Add the {oat, spice} and simmer gently until thick, about {min}.", minutes=(5, 7, 1))
    k.step("Remove from the heat, stir in the {sweet}, and let stand for {min}.",
           "Sweeten with the {sweet} and rest for {min}.", minutes=(1, 2, 1))
    k.step("Top with the {fruit, top} and serve.", "Spoon into bowls and add the {fruit, top}.")


def granola(k: Kitchen) -> None:
    """Oats and nuts baked until crisp."""
    k.batch(8, 1.0, 1.5, 2.0)
    k.add("3 cup oats")
    k.group("nut", 1, 2, "1/2 cup almonds, chopped", "1/2 cup walnuts, chopped",
            "1/2 cup pecans, chopped", "1/3 cup pumpkin seeds")
    k.group("seed", 0, 1, "2 tbsp sesame seeds", "2 tbsp chia seeds", "1/2 cup coconut")
    k.group("spice", 1, 1, "1 tsp cinnamon", "1/2 tsp nutmeg", "1 tsp vanilla extract")
    k.add("1/2 tsp salt")
    k.group("sweet", 1, 1, "1/3 cup honey", "1/3 cup maple syrup")
    k.group("fat", 1, 1, "1/4 cup vegetable oil", "1/4 cup olive oil", "1/4 cup butter, melted")
    k.group("fruit", 1, 1, "1/2 cup raisins", "1/2 cup cranberries", "1/2 cup dates, chopped",
            "1/2 cup chocolate chips")
    k.title("{nut:one} Granola" if k.count("nut") == 1 else "{sweet:one} Granola with {nut}",
            "{sweet:one} Granola with {fruit}", "{spice:one} Granola with {nut}",
            "Granola with {nut, fruit}")
    k.tag("breakfast", "baked")
    preheat(k, 300, 325, "line a baking sheet with parchment paper")
    k.call("dry", "almond", "walnut", "pecan", "pumpkin seed", "sesame seed", "chia seed",
           "coconut",
           "cinnamon", "nutmeg", "salt")
    k.call("wet", "honey", "maple syrup", "vegetable oil", "olive oil", "butter", "vanilla extract")
    k.step("Mix the {oat, dry} in a large bowl.", "In a large bowl, combine the {oat, dry}.")
    k.step("Stir the {wet} together, pour over the oats, and mix well.",
           "Warm the {wet} in a small pan and stir into the oats.")
    k.step("Spread on the sheet and bake, stirring once, until golden, about {min}.",
           "Bake on the sheet for {min}, stirring halfway.", minutes=(25, 35, 5))
    k.step("Cool completely, then stir in the {fruit}.",
           "Let cool on the sheet and add the {fruit}.", minutes=20)


def smoothie(k: Kitchen) -> None:
    """Fruit blended with milk or yogurt."""
    k.serves(1, 2)
    k.group("fruit", 1, 2, "1 banana, peeled", "3/4 cup strawberries", "1/2 cup blueberries",
            "1/2 cup raspberries", "3/4 cup mangoes, cubed", "3/4 cup pineapple, cubed",
            "1 peach, pitted", "1/2 cup cherries")
    k.group("green", 0, 1, "1 cup spinach", "1/2 cup kale", "1/4 avocado")
    k.group("base", 1, 1, "3/4 cup milk", "1/2 cup orange juice", "1/2 cup coconut milk",
            "1/2 cup yogurt", "1/2 cup Greek yogurt", "1/2 cup buttermilk")
    k.group("extra", 1, 1, "1 tbsp peanut butter", "2 tbsp oats", "1/2 tbsp chia seeds",
            "1 tsp ginger, grated", "1/2 tbsp cocoa powder")
    k.group("sweet", 0, 1, "1 tsp honey", "1 tsp maple syrup", "2 date", "1/4 tsp vanilla extract")
    k.title("{fruit:one} Smoothie" if k.count("fruit") == 1 else "Smoothie with {fruit}",
            "{fruit:one} and {base:one} Smoothie" if k.count("fruit") == 1 else
            "{base:one} Smoothie with {fruit}",
            *(["Green Smoothie with {fruit}"] if k.has("spinach", "kale") else []))
    k.tag("drink", "no-cook")
    if k.chance(50):
        k.step("Freeze the {fruit} for 1 hour, or use frozen.", "Chill the {fruit} well.")
    k.step("Put the {fruit, green, base, extra, sweet} in a blender.",
           "Pour the {base} into a blender and add the {fruit, green, extra, sweet}.",
           "Place the {fruit, green, extra, sweet, base} in a blender.")
    seconds = k.between(30, 60, 15)
    k.step(f"Blend until smooth, about {seconds} seconds.",
           f"Blend on high for {seconds} seconds.", minutes=1)
    k.step("Pour into glasses and serve cold." if k.servings > 1 else
           "Pour into a glass and serve cold.",
           "Serve at once.")


FAMILIES: tuple[Family, ...] = (
    omelette,
    frittata,
    pancakes,
    oatmeal,
    granola,
    smoothie,
)

"""Muffins, breads and other things from flour that are not cake."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def muffins(k: Kitchen) -> None:
    """Sweet muffins with fruit."""
    k.batch(12, 1.0, 2.0)
    k.group("flour", 1, 1, "2 cup flour", "2 cup whole wheat flour")
    k.group("sugar", 1, 1, "3/4 cup sugar", "2/3 cup brown sugar", "1/2 cup sugar")
    k.add("2 tsp baking powder", "1/2 tsp salt")
    k.group("spice", 0, 1, "1 tsp cinnamon", "1/2 tsp nutmeg")
    k.add("2 egg")
    k.group("milk", 1, 1, "3/4 cup milk", "3/4 cup buttermilk", "3/4 cup yogurt")
    k.group("fat", 1, 1, "1/3 cup butter, melted", "1/3 cup vegetable oil")
    k.group("zest", 0, 1, "1 tsp vanilla extract", "1 tsp lemon zest")
    k.group("fruit", 1, 1, "1 cup blueberries", "1 cup raspberries", "2 banana, mashed",
            "1 apple, peeled and diced", "1 cup carrots, grated", "1 cup zucchini, grated",
            "3/4 cup chocolate chips", "1 cup strawberries, diced", "1 pear, diced")
    k.group("nut", 0, 1, "1/2 cup walnuts, chopped", "1/2 cup pecans, chopped", "1/3 cup oats")
    k.title("{fruit:one} Muffins", "{fruit:one} Muffins with {nut}" if k.has("nut") else
            "Bakery {fruit:one} Muffins", "{spice:one} {fruit:one} Muffins" if k.has("spice") else
            "{fruit:one} Muffins", "{fruit:one} and {zest:one} Muffins" if k.has("lemon zest")
            else "Moist {fruit:one} Muffins")
    k.tag("muffins", "baked")
    preheat(k, 350, 375, f"line {k.servings} muffin cups with paper liners")
    k.step("Whisk the {flour, sugar, baking powder, salt, spice} in a large bowl.",
           "In a large bowl, mix the {flour, sugar, baking powder, salt, spice}.")
    k.step("Beat the {egg, milk, fat, zest}, and stir into the dry mixture until just combined.",
           "In another bowl, whisk the {egg, milk, fat, zest}. Pour into the dry mixture and stir "
           "briefly.")
    k.step("Fold in the {fruit, nut}.", "Gently fold in the {fruit, nut}.")
    k.step("Divide among the cups and bake until a toothpick comes out clean, {min}.",
           "Spoon into the cups and bake for {min}, until golden and springy.",
           minutes=(18, 24, 1))
    k.step("Cool in the pan for {min}.", "Let cool for {min} before removing from the pan.",
           minutes=(5, 10, 5))


def quick_bread(k: Kitchen) -> None:
    """Banana, pumpkin or zucchini bread in a loaf pan."""
    k.batch(10, 1.0, 2.0)
    k.group("main", 1, 1, "3 banana, mashed", "1 cup pumpkin puree", "3/2 cup zucchini, grated",
            "3/2 cup carrots, grated", "3/2 cup apples, grated")
    k.group("fat", 1, 1, "1/2 cup butter, melted", "1/2 cup vegetable oil")
    k.group("sugar", 1, 1, "3/4 cup sugar", "3/4 cup brown sugar", "1/2 cup honey",
            "1/2 cup maple syrup")
    k.add("2 egg", "7/4 cup flour", "1 tsp baking soda", "1/2 tsp salt")
    k.group("spice", 1, 2, "1 tsp cinnamon", "1/4 tsp nutmeg", "1 tsp vanilla extract",
            "1 tsp lemon zest")
    k.group("add", 0, 1, "1/2 cup walnuts, chopped", "1/2 cup pecans, chopped", "1/2 cup raisins",
            "1/2 cup chocolate chips", "1/2 cup cranberries")
    k.title("{main:one} Bread", *(["{main:one} {add:one} Bread", "{main:one} Bread with {add}"]
            if k.has("add") else ["Classic {main:one} Bread", "{main:one} Bread with {spice}"]))
    k.tag("bread", "baked")
    pans = "a loaf pan" if k.servings == 10 else "2 loaf pans"
    preheat(k, 325, 350, f"grease {pans}")
    k.step("Whisk the {fat, sugar, egg} until smooth, then stir in the {main}.",
           "Beat the {fat, sugar, egg} in a large bowl. Stir in the {main}.")
    k.step("Add the {flour, baking soda, salt, spice} and mix until just combined.",
           "Stir in the {flour, baking soda, salt, spice}; do not overmix.")
    if k.has("add"):
        k.step("Fold in the {add}.", "Stir in the {add}.")
    k.step("Pour into the pan and bake until a skewer comes out clean, about {min}."
           if k.servings == 10 else
           "Divide between the pans and bake until a skewer comes out clean, about {min}.",
           minutes=(50, 60, 5))
    k.step("Cool for {min}, then turn out and slice.",
           "Let stand in the pan for {min} before turning out.", minutes=(10, 15, 5))


def yeast_bread(k: Kitchen) -> None:
    """A kneaded loaf, rolls or flat bread."""
    k.batch(10, 1.0, 2.0)
    k.add("1 cup water, warm", "9/4 tsp yeast")
    k.group("sweet", 1, 1, "1 tbsp sugar", "1 tbsp honey")
    k.group("flour", 1, 1, "3 cup flour", "3 cup whole wheat flour")
    k.add("5/4 tsp salt")
    k.group("fat", 1, 1, "2 tbsp olive oil", "2 tbsp butter, melted")
    k.group("add", 0, 2, "1 tsp rosemary", "1/4 cup pumpkin seeds", "1/2 cup olives, chopped",
            "2 tbsp sesame seeds", "1/2 cup walnuts, chopped", "1/2 cup raisins", "1 tsp oregano",
            "1/3 cup Parmesan cheese", "1/2 cup oats")
    shape = k.pick("Loaf", "Rolls", "Flatbread")
    grain = "Whole Wheat " if k.has("whole wheat flour") else ""
    k.title(*([f"{{add:one}} {shape}" if k.count("add") == 1 else f"{shape} with {{add}}",
               f"{grain}{shape} with {{add}}"] if k.has("add") else
              [f"{grain or 'White '}{shape}", f"Homemade {grain}{shape}",
               f"{'Honey ' if k.has('honey') else 'Soft '}{grain}{shape}"]))
    k.tag("bread", "baked")
    k.step("Stir the {water, yeast, sweet} in a large bowl and let stand until foamy, {min}.",
           "In a large bowl, dissolve the {yeast, sweet} in the {water}. Wait {min}.",
           minutes=(5, 10, 5))
    k.step("Add the {flour, salt, fat} and mix to a soft dough.",
           "Stir in the {flour, salt, fat} until a dough forms.")
    k.step("Knead until smooth, about {min}, working in the {add}." if k.has("add") else
           "Knead on a clean surface until smooth, about {min}.", minutes=(8, 10, 1))
    k.step("Cover and let rise until doubled, about {min}.",
           "Let the dough rise, covered, for {min}.", minutes=(60, 90, 30))
    if shape == "Loaf":
        k.step("Shape into 2 loaves, place in oiled loaf pans, and let rise for {min}."
               if k.servings > 10 else
               "Shape into a loaf, place in an oiled loaf pan, and let rise for {min}.",
               minutes=(30, 45, 15))
    elif shape == "Rolls":
        k.step(f"Divide into {k.servings} pieces, roll into balls, and let rise on a baking sheet "
               f"for {{min}}.", minutes=(30, 45, 15))
    else:
        k.step(f"Divide into {k.servings} pieces and roll each out thin."
               if k.chance(60) else "Press the dough flat on an oiled baking sheet.")
    time = {"Loaf": (30, 35, 1), "Rolls": (15, 20, 1), "Flatbread": (12, 16, 1)}[shape]
    degrees = {"Loaf": k.between(375, 400, 25), "Rolls": 375, "Flatbread": k.between(425, 450, 25)}
    k.step(f"Bake at {degrees[shape]} degrees F until golden, about {{min}}.",
           f"Bake in a {degrees[shape]} degree F oven for {{min}}.", minutes=time)
    k.step("Cool before slicing." if shape == "Loaf" else "Serve warm.")


def biscuits(k: Kitchen) -> None:
    """Biscuits and scones."""
    k.batch(8, 1.0, 2.0)
    k.add("2 cup flour", "1 tbsp baking powder", "1/2 tsp salt")
    sweet = k.chance(60)
    if sweet:
        k.group("sugar", 1, 1, "1/4 cup sugar", "3 tbsp brown sugar")
        k.group("add", 1, 1, "1/2 cup blueberries", "1/2 cup cranberries", "1/2 cup raisins",
                "1/2 cup chocolate chips", "1/2 cup strawberries, diced", "1/2 cup dates, chopped")
        k.group("spice", 0, 1, "1/2 tsp cinnamon", "1 tsp lemon zest", "1/4 tsp nutmeg")
    else:
        k.group("add", 1, 1, "3/4 cup cheddar cheese", "1/2 cup feta cheese",
                "2 tbsp chives, chopped",
                "1/3 cup Parmesan cheese", "1/2 cup ham, finely diced")
        k.group("spice", 0, 1, "1/4 tsp black pepper", "1/2 tsp thyme", "1/4 tsp paprika")
    k.add("6 tbsp butter, cold and cubed")
    k.group("milk", 1, 1, "3/4 cup buttermilk", "2/3 cup milk", "3/4 cup cream")
    word = "Scones" if sweet else "Biscuits"
    k.title(f"{{add:one}} {word}",
            *([f"{{add:one}} and {{spice:one}} {word}"] if k.has("spice") else
            [f"Tender {{add:one}} {word}"]),
            f"{{add:one}} Buttermilk {word}" if k.has("buttermilk") else f"{word} with {{add}}")
    k.tag("baked", "breakfast")
    preheat(k, 400, 425, "line a baking sheet with parchment paper")
    k.call("dry", "sugar", "brown sugar", "baking powder", "salt", "cinnamon", "nutmeg",
           "black pepper",
           "thyme", "paprika")
    k.step("Whisk the {flour, dry} in a bowl.", "In a large bowl, mix the {flour, dry}.")
    k.step("Rub in the {butter} with your fingers until crumbly.",
           "Cut the {butter} into the flour until it looks like coarse crumbs.")
    k.call("late", "lemon zest")
    k.step("Stir in the {add, late}, then the {milk}, to make a soft dough.",
           "Add the {add, late, milk} and stir until the dough just holds together.")
    k.step(f"Pat out 1 inch thick and cut into {k.servings} pieces.",
           f"Press the dough flat on a floured board and cut out {k.servings} {word.lower()}.")
    k.step("Bake until golden brown, about {min}.", "Arrange on the sheet and bake for {min}.",
           minutes=(13, 18, 1))


def cornbread(k: Kitchen) -> None:
    """Cornbread in a pan."""
    k.batch(9, 1.0, 2.0)
    k.add("1 cup cornmeal", "1 cup flour", "1 tbsp baking powder", "1/2 tsp salt")
    k.group("sweet", 1, 1, "1/4 cup sugar", "3 tbsp honey", "3 tbsp brown sugar",
            "3 tbsp maple syrup")
    k.group("milk", 1, 1, "1 cup buttermilk", "1 cup milk", "1 cup yogurt")
    k.add("2 egg")
    k.group("fat", 1, 1, "1/4 cup butter, melted", "1/4 cup vegetable oil")
    k.group("add", 0, 2, "1/2 cup corn, thawed", "1 jalapeno pepper, minced",
            "3/4 cup cheddar cheese", "2 green onion, sliced", "2 slice bacon, cooked and crumbled")
    k.group("spice", 0, 1, "1/4 tsp smoked paprika", "1/4 tsp black pepper", "1/2 tsp chili powder")
    k.title(*(["{add:one} Cornbread" if k.count("add") == 1 else "Cornbread with {add}",
               "Skillet Cornbread with {add}"] if k.has("add") else
              ["{sweet:one} Cornbread", "Simple Cornbread", "Cornbread with {sweet}"]),
            *(["Buttermilk Cornbread"] if k.has("buttermilk") else []))
    k.tag("bread", "baked")
    preheat(k, 375, 400, "grease an 8-inch baking pan" if k.servings == 9 else
            "grease a 9 by 13-inch baking pan")
    k.step("Mix the {cornmeal, flour, baking powder, salt, spice} in a large bowl.",
           "In a large bowl, whisk the {cornmeal, flour, baking powder, salt, spice}.")
    k.step("Whisk the {sweet, milk, egg, fat}, pour into the bowl, and stir until just combined.",
           "Stir in the {milk, egg, sweet, fat} until no dry spots remain.")
    if k.has("add"):
        k.step("Fold in the {add}.", "Stir in the {add}.")
    k.step("Bake until golden and firm in the middle, about {min}.",
           "Spread in the pan and bake for {min}.", minutes=(20, 28, 1))
    k.step("Cool for {min} and cut into squares.", "Let stand for {min}, then cut.",
           minutes=(5, 10, 5))


FAMILIES: tuple[Family, ...] = (
    muffins,
    quick_bread,
    yeast_bread,
    biscuits,
    cornbread,
)

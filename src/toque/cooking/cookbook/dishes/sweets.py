"""Cookies, cakes and desserts."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def cookies(k: Kitchen) -> None:
    """Drop cookies."""
    k.batch(24, 1.0, 2.0)
    k.add("1 cup butter, softened" if k.chance(60) else "3/4 cup butter, softened")
    if k.chance(50):
        k.add("1/2 cup sugar", "1/2 cup brown sugar")
    else:
        k.add("1 cup sugar" if k.chance(50) else "1 cup brown sugar")
    k.call("sugars", "sugar", "brown sugar")
    k.add("1 egg" if k.chance(50) else "2 egg", "1 tsp vanilla extract")
    oats = k.chance(40)
    k.add("3/2 cup flour" if oats else "9/4 cup flour")
    if oats:
        k.add("3/2 cup oats")
    k.add("1 tsp baking soda" if k.chance(60) else "1 tsp baking powder", "1/2 tsp salt")
    k.group("spice", 0, 1, "1 tsp cinnamon", "1/4 tsp nutmeg", "1/4 cup cocoa powder")
    k.group("add", 1, 2, "1 cup chocolate chips", "3/4 cup raisins", "3/4 cup walnuts, chopped",
            "3/4 cup pecans, chopped", "3/4 cup cranberries", "3/4 cup coconut",
            "3/4 cup peanuts, chopped", "3/4 cup dates, chopped")
    word = "Oat Cookies" if oats else "Cookies"
    k.title(f"{{add:one}} {word}" if k.count("add") == 1 else f"{word} with {{add}}",
            f"{k.pick('Chewy', 'Soft', 'Crisp')} {{add:one}} {word}" if k.count("add") == 1 else
            f"{{add:one}} {word}",
            *([f"{{spice:one}} {word} with {{add}}"] if k.has("spice") else []))
    k.tag("dessert", "cookies", "baked")
    preheat(k, 350, 375, "line two baking sheets with parchment paper")
    k.step("Beat the {butter, sugars} until light and fluffy, about {min}.",
           "Cream the {butter, sugars} for {min}.", minutes=(2, 3, 1))
    k.step("Beat in the {egg, vanilla extract}.", "Add the {egg, vanilla extract} and beat well.")
    k.step("Stir in the {flour, oat, baking soda, baking powder, salt, spice}.",
           "Add the {flour, oat, baking soda, baking powder, salt, spice} and mix until "
           "combined.")
    k.step("Fold in the {add}.", "Stir in the {add}.")
    k.step("Drop spoonfuls of dough 2 inches apart on the sheets.",
           "Scoop rounded tablespoons of dough onto the sheets.")
    k.step("Bake until the edges are golden, {min}, and cool on a rack.",
           "Bake for {min}. Cool on the sheets for 5 minutes.", minutes=(9, 13, 1))


def brownies(k: Kitchen) -> None:
    """Brownies and blondies in a pan."""
    k.batch(16, 1.0, 2.0)
    k.group("fat", 1, 1, "1/2 cup butter", "1/2 cup vegetable oil")
    dark = k.chance(65)
    k.group("sugar", 1, 1, "1 cup sugar", "1 cup brown sugar")
    k.add("2 egg", "1 tsp vanilla extract", "2/3 cup flour" if dark else "1 cup flour")
    if dark:
        k.add("1/2 cup cocoa powder")
    k.add("1/4 tsp baking powder", "1/4 tsp salt")
    k.group("add", 1, 2, "1/2 cup chocolate chips", "1/2 cup walnuts, chopped",
            "1/2 cup pecans, chopped", "1/4 cup peanut butter", "1/2 cup cherries, halved",
            "1/2 cup coconut", "1/2 cup raspberries")
    word = "Brownies" if dark else "Blondies"
    k.title(f"{{add:one}} {word}" if k.count("add") == 1 else f"{word} with {{add}}",
            f"Fudgy {word} with {{add}}", f"{word} with {{add}}")
    k.tag("dessert", "baked")
    preheat(k, 325, 350, "line an 8-inch square pan with parchment paper" if k.servings == 16 else
            "line a 9 by 13-inch pan with parchment paper")
    k.step("Melt the {fat} in a saucepan, remove from the heat, and stir in the {sugar}."
           if k.has("butter") else "Whisk the {fat, sugar} in a large bowl.")
    k.step("Beat in the {egg, vanilla extract}.", "Add the {egg, vanilla extract} and whisk until "
           "glossy.")
    k.step("Stir in the {flour, cocoa powder, baking powder, salt} until just smooth.",
           "Sift in the {flour, cocoa powder, baking powder, salt} and stir.")
    k.step("Fold in the {add} and spread in the pan.",
           "Stir in the {add}. Pour the batter into the pan.")
    k.step("Bake until just set, about {min}.",
           "Bake for {min}; a toothpick should have a few moist crumbs.", minutes=(22, 30, 1))
    k.step("Cool completely and cut into squares.", "Cool in the pan before cutting.")


def cake(k: Kitchen) -> None:
    """A simple cake with a glaze or frosting."""
    k.batch(10, 1.0, 2.0)
    k.add("3/2 cup flour", "3/2 tsp baking powder", "1/4 tsp salt")
    k.group("flavor", 1, 1, "1 tbsp lemon zest", "1/3 cup cocoa powder", "2 tsp cinnamon",
            "1 cup apples, diced", "1 cup carrots, grated", "1 cup blueberries",
            "3/4 cup coconut", "1 cup almonds, ground", "2 banana, mashed")
    k.add("1/2 cup butter, softened", "1 cup sugar" if k.chance(60) else "3/4 cup sugar", "2 egg")
    k.group("milk", 1, 1, "1/2 cup milk", "1/2 cup buttermilk", "1/2 cup yogurt",
            "1/2 cup sour cream")
    k.add("1 tsp vanilla extract")
    k.group("frost", 1, 1, "4 oz cream cheese, softened", "2 tbsp lemon juice",
            "2 tbsp orange juice",
            "1/2 cup cream")
    k.add("1/4 cup powdered sugar" if k.has("cream") else "1 cup powdered sugar")
    glaze = ("Cream Cheese Frosting" if k.has("cream cheese") else "Whipped Cream"
             if k.has("cream") else "Glaze")
    k.title("{flavor:one} Cake", f"{{flavor:one}} Cake with {glaze}",
            "{milk:one} Cake with {flavor}", "{flavor:one} and {milk:one} Cake")
    k.tag("dessert", "cake", "baked")
    pans = "a 9-inch cake pan" if k.servings == 10 else "two 9-inch cake pans"
    preheat(k, 325, 350, f"grease {pans}")
    k.step("Beat the {butter, sugar} until fluffy, then beat in the {egg}, one at a time.",
           "Cream the {butter, sugar} for 3 minutes. Add the {egg} and beat well.", minutes=4)
    k.step("Mix in the {flour, baking powder, salt}, alternating with the {milk, vanilla extract}.",
           "Stir in half of the {flour, baking powder, salt}, then the {milk, vanilla extract}, "
           "then the rest.")
    k.step("Stir in the {flavor}.", "Fold in the {flavor}.")
    where = "Pour into the pan" if k.servings == 10 else "Divide between the pans"
    k.step(f"{where} and bake until a toothpick comes out clean, {{min}}.",
           f"{where} and bake for {{min}}, until the cake springs back.",
           minutes=(28, 38, 2))
    if k.has("cream"):
        k.step("Whip the {frost, powdered sugar} to soft peaks.",
               "Beat the {frost} with the {powdered sugar} until thick.", minutes=3)
    else:
        k.step("Beat the {frost, powdered sugar} until smooth.",
               "Stir the {frost} into the {powdered sugar} until smooth.")
    k.step("Cool the cake, then spread with the topping.",
           "When the cake is cool, cover it with the topping.", minutes=30)


def fruit_crisp(k: Kitchen) -> None:
    """Fruit baked under oats or crumbs."""
    k.serves(4, 6, 8)
    k.group("fruit", 1, 2, "1/2 apple, sliced", "1/2 pear, sliced", "3/4 peach, sliced",
            "1/2 cup blueberries", "1/2 cup strawberries, halved", "1/2 cup cherries",
            "1/2 cup raspberries")
    k.group("sugar", 1, 1, "1 tbsp sugar", "1 tbsp honey", "1 tbsp maple syrup")
    k.add("1 tsp cornstarch", "1 tsp lemon juice")
    k.add("2 tbsp oats", "2 tbsp flour", "1 tbsp brown sugar")
    k.group("spice", 1, 1, "1/8 tsp cinnamon", "1/16 tsp nutmeg")
    k.group("nut", 0, 1, "1 tbsp walnuts, chopped", "1 tbsp almonds, chopped",
            "1 tbsp pecans, chopped", "1 tbsp coconut")
    k.add("1 tbsp butter, cold and cubed")
    k.group("side", 0, 1, "2 tbsp Greek yogurt", "1 tbsp cream")
    k.title("{fruit:one} Crisp" if k.count("fruit") == 1 else "Crisp with {fruit}",
            "{fruit:one} and {nut:one} Crisp" if k.has("nut") and k.count("fruit") == 1 else
            "Warm Crisp with {fruit}", "{spice:one} {fruit:one} Crisp" if k.count("fruit") == 1
            else "Oat Crisp with {fruit}")
    k.tag("dessert", "baked")
    preheat(k, 350, 375, "set out a baking dish")
    k.step("Toss the {fruit} with the {sugar, cornstarch, lemon juice} in the dish.",
           "In the dish, mix the {fruit, sugar, cornstarch, lemon juice}.")
    k.step("Rub the {butter} into the {oat, flour, brown sugar, spice} until crumbly, and stir in "
           "the {nut}." if k.has("nut") else
           "Rub the {butter} into the {oat, flour, brown sugar, spice} until crumbly.")
    k.step("Scatter the topping over the fruit.", "Spread the crumbs evenly on top.")
    k.step("Bake until bubbling and golden, about {min}.",
           "Bake for {min}, until the fruit is soft.", minutes=(30, 40, 5))
    k.step("Serve warm with the {side}." if k.has("side") else
           "Let stand for 10 minutes and serve warm.")


def fruit_pie(k: Kitchen) -> None:
    """A pie or open tart from bought crust."""
    k.batch(8, 1.0)
    double = k.chance(50)
    k.add("2 pie crust" if double else "1 pie crust")
    n, cups = (6, 5) if double else (4, 3)
    k.group("fruit", 1, 1, f"{n} apple, peeled and sliced", f"{cups} cup blueberries",
            f"{n} peach, peeled and sliced", f"{cups} cup cherries",
            f"{cups} cup strawberries, halved", f"{n} pear, peeled and sliced")
    k.group("more", 0, 1, "1 cup raspberries", "1/2 cup cranberries", "1/2 cup raisins")
    k.group("sugar", 1, 1, "1/2 cup sugar", "2/3 cup sugar", "2/3 cup brown sugar", "3/4 cup sugar")
    k.group("thick", 1, 1, "3 tbsp cornstarch", "1/4 cup flour")
    k.add("1 tbsp lemon juice" if k.chance(70) else "1 tsp lemon zest")
    k.group("spice", 0, 2, "1 tsp cinnamon", "1/4 tsp nutmeg", "1 tsp vanilla extract",
            "1/4 tsp salt")
    k.add("1 tbsp butter, cubed")
    if double:
        k.add("1 egg, beaten")
    k.call("lemon", "lemon juice", "lemon zest")
    word = "Pie" if double else "Tart"
    k.title(f"{{fruit:one}} {word}", f"Classic {{fruit:one}} {word}",
            f"{{fruit:one}} and {{more:one}} {word}" if k.has("more") else
            f"Rustic {{fruit:one}} {word}")
    k.tag("dessert", "pie", "baked")
    preheat(k, 375, 400, "set out a 9-inch pie pan" if double else
            "line a baking sheet with parchment paper")
    k.step("Mix the {fruit, more, sugar, thick, lemon, spice} in a large bowl.",
           "In a large bowl, toss the {fruit, more} with the {sugar, thick, lemon, spice}.")
    if double:
        k.step("Line the pan with one of the {pie crust}, add the filling, and dot with the "
               "{butter}.",
               "Fit one of the {pie crust} into the pan. Fill with the fruit and dot with the "
               "{butter}.")
        k.step("Cover with the other crust, seal the edges, cut a few slits, and brush with the "
               "{egg}.",
               "Top with the second crust, crimp, cut vents, and brush with the {egg}.")
    else:
        k.step("Lay the {pie crust} on the sheet, pile the fruit in the middle, and dot with the "
               "{butter}.")
        k.step("Fold the edge of the crust over the fruit.",
               "Fold in the edges, leaving the middle "
               "open.")
    k.step("Bake until the crust is brown and the filling bubbles, about {min}.",
           "Bake for {min}, until golden and bubbling.", minutes=(45, 60, 5))
    k.step("Cool for {min} before slicing.", "Let cool for {min}.", minutes=(60, 120, 30))


def rice_pudding(k: Kitchen) -> None:
    """Rice simmered in milk."""
    k.serves(4, 6)
    k.add("2 tbsp rice" if k.chance(50) else "2 tbsp arborio rice")
    k.call("grain", "rice", "arborio rice")
    k.group("milk", 1, 1, "1 cup milk", "1/2 cup coconut milk")
    if k.has("coconut milk"):
        k.add("1/2 cup water")
    k.group("sugar", 1, 1, "1 tbsp sugar", "1 tbsp brown sugar", "1 tbsp maple syrup",
            "1 tbsp honey")
    k.add("1 pinch salt")
    k.group("spice", 1, 2, "1/8 tsp cinnamon", "1/16 tsp nutmeg", "1/4 tsp vanilla extract",
            "1/4 tsp lemon zest")
    k.group("add", 0, 1, "1 tbsp raisins", "1 tbsp cranberries", "1 tbsp dates, chopped")
    k.group("top", 0, 1, "1/2 tbsp almonds, toasted", "1/4 mango, cubed", "2 tbsp raspberries",
            "1/4 cup cherries", "1 tbsp pecans, chopped")
    k.title("{spice:one} Rice Pudding" if k.count("spice") == 1 else "Rice Pudding with {spice}",
            "{milk:one} Rice Pudding", *(["Rice Pudding with {top}",
                                          "{milk:one} Rice Pudding with {top}"]
            if k.has("top") else ["Creamy Rice Pudding"]))
    k.tag("dessert")
    k.call("liquid", "milk", "coconut milk", "water")
    k.step("Bring the {grain, liquid, salt} to a gentle boil in a heavy saucepan.",
           "Heat the {liquid, salt} in a saucepan and stir in the {grain}.")
    k.step("Simmer over low heat, stirring often, until thick, about {min}.",
           "Cook uncovered on low for {min}, stirring now and then.", minutes=(30, 40, 5))
    k.step("Stir in the {sugar, spice, add} and cook for {min} more.",
           "Add the {sugar, spice, add} and simmer for {min}.", minutes=(3, 5, 1))
    k.step("Serve warm or cold with the {top}." if k.has("top") else "Serve warm or chilled.")


def energy_bites(k: Kitchen) -> None:
    """Rolled balls of oats and nut butter, not baked."""
    k.batch(12, 1.0, 2.0)
    k.add("1 cup oats")
    k.group("butter", 1, 1, "1/2 cup peanut butter", "1/2 cup tahini")
    k.group("sweet", 1, 1, "1/4 cup honey", "1/4 cup maple syrup")
    k.group("add", 2, 3, "1/4 cup chocolate chips", "1/3 cup coconut", "1/4 cup raisins",
            "1/4 cup cranberries", "1/4 cup almonds, chopped", "1/4 cup dates, chopped",
            "1/4 cup walnuts, chopped", "2 tbsp cocoa powder")
    k.group("seed", 0, 1, "2 tbsp chia seeds", "2 tbsp sesame seeds", "2 tbsp pumpkin seeds")
    k.group("spice", 1, 1, "1/2 tsp cinnamon", "1 tsp vanilla extract", "1/4 tsp nutmeg")
    k.add("1/8 tsp salt")
    k.title("{butter:one} Oat Bites", "{butter:one} Bites with {add}", "Oat Bites with {add}",
            "{butter:one} and {sweet:one} Bites")
    k.tag("snack", "no-bake")
    k.step("Stir the {butter, sweet, spice, salt} in a large bowl until smooth.",
           "In a large bowl, mix the {butter, sweet, spice, salt}.")
    k.step("Add the {oat, add, seed} and mix until evenly coated.",
           "Fold in the {oat, add, seed}.")
    k.step("Chill for {min} to firm up.", "Refrigerate the mixture for {min}.", minutes=(20, 30,
                                                                                         10))
    k.step(f"Roll into {k.servings * 2} balls.",
           f"Shape into {k.servings * 2} small balls and keep refrigerated.")


FAMILIES: tuple[Family, ...] = (
    cookies,
    brownies,
    cake,
    fruit_crisp,
    fruit_pie,
    rice_pudding,
    energy_bites,
)

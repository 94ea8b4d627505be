"""Food held in the hand: tacos, burgers, wraps, pizza, toast."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import salt_and_pepper
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def tacos(k: Kitchen) -> None:
    """Corn tortillas with a spiced filling."""
    k.serves(2, 4, 6)
    k.add("2 corn tortillas" if k.chance(60) else "2 flour tortillas")
    k.call("tortilla", "corn tortilla", "flour tortilla")
    k.add("1/2 tbsp vegetable oil")
    k.group("fill", 1, 1, "1/4 lb ground beef", "1/4 lb ground turkey", "1/4 lb shrimp",
            "1/4 lb chicken thighs, cut into strips", "1 cod fillet",
            "1/4 can black beans, drained and rinsed", "1/2 cup mushrooms, sliced")
    k.group("spice", 2, 2, "1/4 tsp cumin", "1/2 tsp chili powder", "1/4 tsp smoked paprika",
            "1/8 tsp oregano", "1/4 tsp coriander")
    k.add("1/8 tsp salt")
    k.group("top", 2, 3, "2 tbsp salsa", "1/4 avocado, sliced", "1/4 cup cabbage, shredded",
            "1 tbsp cilantro, chopped", "1 tbsp feta cheese", "1/4 tomato, diced",
            "1 tbsp sour cream", "2 tbsp corn, thawed")
    k.add("1/2 tbsp lime juice")
    k.title("{fill:one} Tacos", "{fill:one} Tacos with {top}", "Spiced {fill:one} Tacos",
            "Weeknight {fill:one} Tacos")
    k.tag("tacos")
    time = ((4, 5, 1) if k.has("shrimp", "mushroom", "black bean")
            else (8, 10, 1) if k.has("chicken thigh") else (6, 8, 1))
    k.step("Heat the {vegetable oil} in a skillet over medium-high heat and cook the {fill} for "
           "{min}.",
           "In a large skillet, cook the {fill} in the {vegetable oil} until done, {min}.",
           minutes=time)
    k.step("Stir in the {spice, salt} and cook for 1 minute." if not k.has("cod fillet") else
           "Break the fish into pieces and stir in the {spice, salt}.",
           "Add the {spice, salt} and toss for 1 minute." if not k.has("cod fillet") else
           "Flake the fish and season with the {spice, salt}.")
    k.step("Warm the {tortilla} in a dry pan for {min}.",
           "Heat the {tortilla} in a low oven or dry skillet for {min}.", minutes=(2, 4, 1))
    k.step("Fill the {tortilla} with the {fill} and top with the {top}.",
           "Spoon the {fill} into the {tortilla} and add the {top}.")
    k.step("Sprinkle with the {lime juice} and serve.", "Drizzle with the {lime juice}.")


def quesadillas(k: Kitchen) -> None:
    """Tortillas folded over cheese."""
    k.serves(2, 4)
    k.add("1 flour tortilla")
    k.group("cheese", 1, 1, "1/3 cup cheddar cheese", "1/3 cup mozzarella cheese")
    k.group("fill", 1, 2, "1/4 cup mushrooms, sliced", "1/2 cup spinach, chopped",
            "1/8 can black beans, drained and rinsed", "2 tbsp corn, thawed",
            "1/4 green bell pepper, sliced", "1/4 cup ham, diced", "1/4 zucchini, thinly sliced")
    k.group("spice", 1, 1, "1/8 tsp cumin", "1/8 tsp chili powder", "1/8 tsp smoked paprika")
    k.add("1 tsp vegetable oil")
    k.group("dip", 1, 1, "1 tbsp sour cream", "2 tbsp salsa", "1/4 avocado, sliced")
    k.title("{fill:one} Quesadillas" if k.count("fill") == 1 else "Quesadillas with {fill}",
            "Quesadillas with {fill, cheese}", "{cheese:one} Quesadillas with {fill}")
    k.tag("lunch")
    k.step("Cook the {fill, spice} in half of the {vegetable oil} in a skillet for {min}.",
           "Heat half of the {vegetable oil} in a skillet and cook the {fill, spice} for {min}.",
           minutes=(3, 5, 1))
    k.step("Sprinkle half of each tortilla with the {cheese} and add the filling. Fold over.",
           "Divide the filling and the {cheese} among the {flour tortilla} and fold in half.")
    k.step("Heat the remaining oil and toast the {flour tortilla} for {min} on each side.",
           "Fry the folded {flour tortilla} in the rest of the oil, {min} per side.",
           minutes=(2, 3, 1))
    k.step("Cut into wedges and serve with the {dip}.", "Slice and serve hot with the {dip}.")


def burgers(k: Kitchen) -> None:
    """Patties of meat on buns."""
    k.serves(2, 4, 6)
    k.group("meat", 1, 1, "1/3 lb ground beef", "1/3 lb ground turkey")
    k.group("mix", 1, 1, "1/4 shallot, minced", "1/2 green onion, sliced",
            "1/2 clove garlic, minced",
            "1/2 tsp Dijon mustard")
    salt_and_pepper(k)
    k.add("1 tsp vegetable oil")
    k.group("cheese", 0, 1, "2 tbsp cheddar cheese", "2 tbsp Swiss cheese", "1 tbsp feta cheese")
    k.add("1 burger bun, split")
    k.group("top", 2, 3, "1/2 cup romaine lettuce, torn", "1/4 tomato, sliced",
            "1/8 red onion, thinly sliced", "1/4 avocado, sliced", "1 slice bacon, cooked",
            "1/8 cucumber, sliced")
    k.group("sauce", 1, 1, "1 tbsp ketchup", "1 tbsp mayonnaise", "1 tbsp sour cream")
    meat = "Turkey" if k.has("ground turkey") else "Beef"
    k.title(f"{meat} Burgers with {{top}}", f"{meat} Burgers with {{sauce}}",
            f"{meat} {{cheese:one}} Burgers" if k.has("cheese") else f"Simple {meat} Burgers")
    k.tag("burgers")
    k.step("Mix the {meat, mix, salt, black pepper} and shape into patties.",
           "Combine the {meat, mix, salt, black pepper} and form patties.")
    k.step("Heat the {vegetable oil} in a skillet over medium-high heat and cook the patties for "
           "{min} on each side.",
           "Fry the patties in the {vegetable oil} in a hot skillet, {min} per side.",
           minutes=(4, 6, 1))
    if k.has("cheese"):
        k.step("Top with the {cheese}, cover, and melt for 1 minute.",
               "Put the {cheese} on the patties and cover until melted.")
    k.step("Toast the {burger bun} and spread with the {sauce}.",
           "Spread the {sauce} over the toasted {burger bun}.")
    k.step("Fill with the patties and top with the {top}.",
           "Add the patties, top with the {top}, and serve.")


def bean_burgers(k: Kitchen) -> None:
    """Patties of beans on buns."""
    k.serves(2, 4)
    k.group("bean", 1, 1, "1/2 can black beans, drained and rinsed",
            "1/2 can chickpeas, drained and rinsed", "1/2 can kidney beans, drained and rinsed")
    k.group("crumb", 1, 1, "1/4 cup bread crumbs", "1/4 cup oats")
    k.add("1/2 egg, beaten")
    k.group("veg", 1, 1, "1/4 carrot, grated", "1 green onion, sliced", "2 tbsp corn, thawed",
            "1/4 onion, finely chopped")
    k.group("spice", 1, 2, "1/4 tsp cumin", "1/4 tsp smoked paprika", "1/4 tsp chili powder",
            "1/4 tsp coriander")
    k.add("1/8 tsp salt", "1/2 tbsp olive oil", "1 burger bun, split")
    k.group("top", 1, 2, "1/2 cup arugula", "1/4 tomato, sliced", "1/4 avocado, sliced",
            "1/2 cup romaine lettuce, torn")
    k.group("sauce", 1, 1, "1 tbsp ketchup", "1 tbsp Greek yogurt", "1 tbsp mayonnaise",
            "1 tbsp salsa")
    k.title("{bean:one} Burgers", "{bean:one} and {veg:one} Burgers", "Spiced {bean:one} Burgers",
            "{bean:one} Burgers with {sauce}")
    k.tag("burgers")
    k.step("Mash the {bean} with a fork, leaving some pieces.",
           "Crush the {bean} in a bowl until mostly smooth.")
    k.step("Mix in the {crumb, egg, veg, spice, salt} and shape into patties.",
           "Stir in the {crumb, egg, veg, spice, salt}. Form into patties.")
    k.step("Chill the patties for {min}.", "Let the patties rest in the refrigerator for {min}.",
           minutes=(15, 30, 15))
    k.step("Fry in the {olive oil} over medium heat until crisp, {min} per side.",
           "Heat the {olive oil} in a skillet and cook the patties for {min} on each side.",
           minutes=(4, 5, 1))
    k.step("Serve in the {burger bun} with the {top, sauce}.",
           "Fill the {burger bun} with the patties, {top}, and {sauce}.")


def wraps(k: Kitchen) -> None:
    """Cold wraps, no cooking or little."""
    k.serves(2, 4)
    k.add("1 flour tortilla")
    k.group("spread", 1, 1, "1 tbsp cream cheese", "1 tbsp mayonnaise", "1 tbsp pesto",
            "1 tbsp tahini", "2 tbsp Greek yogurt")
    k.group("fill", 1, 1, "1/2 can tuna, drained", "1/4 cup ham, sliced",
            "1 egg, boiled and sliced",
            "1/4 can chickpeas, drained and rinsed", "1/2 avocado, sliced")
    k.group("veg", 2, 3, "1/4 carrot, grated", "1/2 cup spinach", "1/8 cucumber, sliced",
            "1/4 tomato, sliced", "1/2 cup arugula", "1/4 red bell pepper, sliced")
    k.group("extra", 1, 1, "1 tsp lemon juice", "1 tbsp feta cheese", "1 tbsp olives, sliced",
            "1/2 tbsp chives, chopped", "1/2 tbsp dill, chopped")
    k.add("1/16 tsp black pepper")
    k.title("{fill:one} Wraps with {veg}", "{fill:one} and {spread:one} Wraps",
            "{fill:one} Wraps with {extra}")
    k.tag("lunch", "no-cook")
    if k.has("chickpea", "tuna"):
        k.step("Mash the {fill} with the {spread, extra, black pepper}.",
               "In a bowl, mix the {fill, spread, extra, black pepper} with a fork.")
        k.step("Spread over the {flour tortilla}.", "Divide among the {flour tortilla}.")
        k.step("Top with the {veg}.", "Arrange the {veg} on top.")
    else:
        k.step("Spread the {flour tortilla} with the {spread}.",
               "Lay out the {flour tortilla} and cover with the {spread}.")
        k.step("Top with the {fill, veg}.", "Arrange the {fill, veg} down the middle.")
        k.step("Add the {extra, black pepper}.", "Sprinkle with the {extra, black pepper}.")
    k.step("Roll up tightly, cut in half, and serve.", "Fold in the sides, roll up, and slice.")


def pizza(k: Kitchen) -> None:
    """Pizza from bought dough."""
    k.serves(2, 4)
    k.add("1/4 lb pizza dough", "1 tsp olive oil")
    k.group("sauce", 1, 1, "1 oz goat cheese", "1/4 cup ricotta cheese",
            "1 tbsp pesto", "1 tbsp tomato paste")
    k.group("top", 2, 3, "1/4 cup mushrooms, sliced", "1/8 red onion, thinly sliced",
            "1 tbsp olives, sliced", "1/4 green bell pepper, sliced", "1/2 cup spinach",
            "1/4 cup cherry tomatoes, halved", "1 oz Italian sausage, crumbled",
            "1/4 cup ham, diced")
    k.add("1/3 cup mozzarella cheese")
    k.group("last", 1, 1, "1 tbsp basil, torn", "1/4 cup arugula", "1/16 tsp red pepper flakes",
            "1/8 tsp oregano")
    k.title("{top:one} Pizza" if k.count("top") == 2 else "Pizza with {top}",
            "Pizza with {top}", "{sauce:one} Pizza with {last}", "Homemade Pizza with {top}")
    k.tag("pizza", "baked")
    degrees = k.between(450, 475, 25)
    k.step(f"Preheat the oven to {degrees} degrees F with a baking sheet inside.",
           f"Put a baking sheet in the oven and heat to {degrees} degrees F.", minutes=15)
    k.step("Stretch the {pizza dough} on parchment paper to a thin round and brush with the "
           "{olive oil}.",
           "Roll out the {pizza dough} on parchment paper. Brush with the {olive oil}.")
    k.step("Spread with the {sauce} and scatter the {top} and {mozzarella cheese} over it.",
           "Top with the {sauce}, then the {top}, and finally the {mozzarella cheese}.")
    k.step("Slide onto the hot sheet and bake until the crust is brown, {min}.",
           "Bake on the hot sheet for {min}, until bubbling and golden.", minutes=(10, 14, 1))
    k.step("Finish with the {last}, slice, and serve.", "Sprinkle with the {last} and cut.")


def loaded_toast(k: Kitchen) -> None:
    """Toast with a spread and something on it."""
    k.serves(1, 2, 4)
    k.add("2 slice bread" if k.chance(60) else "1 slice bread")
    k.group("spread", 1, 1, "1/2 avocado, mashed", "1/4 cup ricotta cheese", "1 oz goat cheese",
            "2 tbsp cream cheese", "1/4 can white beans, drained and mashed")
    k.group("sour", 1, 1, "1 tsp lemon juice", "1/2 tsp lemon zest", "1 tsp balsamic vinegar")
    k.group("top", 1, 1, "1 egg", "1/2 cup cherry tomatoes, halved", "1/2 cup mushrooms, sliced",
            "1/2 cup strawberries, sliced" if k.has("ricotta cheese", "goat cheese", "cream cheese")
            else "1/2 cup corn, thawed", "1/2 pear, sliced"
            if k.has("ricotta cheese", "goat cheese", "cream cheese") else "1/4 cup peas, thawed")
    k.group("end", 1, 1, "1/16 tsp red pepper flakes", "1/2 tbsp chives, chopped",
            "1 tbsp arugula", "1/2 tbsp mint, chopped", "1/2 tbsp pumpkin seeds",
            "1 tsp sesame seeds")
    k.group("fat", 1, 1, "1/2 tbsp olive oil", "1/2 tbsp butter")
    k.add("1/16 tsp salt")
    k.title("{spread:one} Toast with {top}", "{spread:one} and {top:one} Toast",
            "Toast with {spread:one} and {top}")
    k.tag("breakfast")
    if k.has("strawberry", "pear"):
        k.step("Brush the {bread} with the {fat} and toast in a skillet for {min} per side.",
               minutes=(2, 3, 1))
    else:
        k.step("Toast the {bread} until crisp, about {min}.", minutes=(2, 3, 1))
        k.step("Fry the {top} in the {fat} over medium heat until the whites are set, {min}."
               if k.has("egg") else
               "Cook the {top} in the {fat} over medium heat for {min}.",
               "Heat the {fat} in a small skillet and cook the {top} for {min}.",
               minutes=(3, 5, 1))
    k.step("Mix the {spread, sour, salt} and spread over the toast.",
           "Stir the {spread, sour, salt} together and spread on the toast.")
    k.step("Top with the {top, end} and serve.",
           "Add the {top}, sprinkle with the {end}, and serve "
           "warm.")


FAMILIES: tuple[Family, ...] = (
    tacos,
    quesadillas,
    burgers,
    bean_burgers,
    wraps,
    pizza,
    loaded_toast,
)

"""Rice and other grains."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat, salt_and_pepper, soften
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def risotto(k: Kitchen) -> None:
    """Arborio rice stirred with broth."""
    k.serves(2, 4, 6)
    k.group("broth", 1, 1, "3/2 cup chicken broth", "3/2 cup vegetable broth")
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("allium", 1, 1, "1/4 onion, finely chopped", "1/2 shallot, minced", "1/4 leek, sliced")
    k.group("main", 1, 1, "1 cup mushrooms, sliced", "1/2 cup asparagus, cut up", "1/4 cup peas",
            "1/2 cup butternut squash, diced", "1/4 lb shrimp", "1/2 zucchini, diced")
    k.add("1/3 cup arborio rice", "2 tbsp white wine", "2 tbsp Parmesan cheese")
    k.group("last", 1, 1, "1/2 tsp lemon zest", "1/2 tbsp parsley, chopped",
            "1/2 tbsp chives, chopped", "1/2 cup spinach", "1/4 tsp thyme")
    salt_and_pepper(k, "1/16")
    k.title("{main:one} Risotto", "{main:one} Risotto with {last}", "Creamy {main:one} Risotto",
            "{main:one} and {allium:one} Risotto")
    k.tag("rice")
    k.step("Heat the {broth} in a saucepan and keep it warm.",
           "Bring the {broth} to a simmer in a small pot and keep hot.")
    # Shrimp would turn to rubber if it cooked as long as the rice.
    early = ["allium"] if k.has("shrimp") else ["allium", "main"]
    if k.has("butter"):
        names = ", ".join(early)
        k.step(f"Melt the {{fat}} in a wide pan and cook the {{{names}}} for {{min}}.",
               f"In a heavy pot, melt the {{fat}} and cook the {{{names}}} until soft, {{min}}.",
               minutes=(4, 6, 1))
    else:
        soften(k, k.pick("a wide pan", "a heavy pot"), "fat", *early)
    k.step("Add the {arborio rice} and stir for {min}, then pour in the {white wine} and let it "
           "cook away.",
           "Stir in the {arborio rice}, toast for {min}, add the {white wine}, and stir until "
           "absorbed.", minutes=(2, 3, 1))
    k.step("Add the {broth} a ladle at a time, stirring, until the rice is creamy and tender, "
           "about {min}.",
           "Stir in the {broth} little by little, letting it absorb, for {min}.",
           minutes=(18, 22, 1))
    if k.has("shrimp"):
        k.step("Stir in the {main} and cook until pink, {min}.",
               "Add the {main} and cook for {min}.", minutes=(3, 4, 1))
    k.step("Stir in the {Parmesan cheese, last}, season with the {salt, black pepper}, and serve.",
           "Off the heat, stir in the {Parmesan cheese, last, salt, black pepper}. Serve at "
           "once.")


def fried_rice(k: Kitchen) -> None:
    """Cold rice fried with egg and vegetables."""
    k.serves(2, 4)
    k.add("1 cup cooked rice, chilled|cold", "1 egg, beaten")
    k.group("main", 0, 1, "1/4 lb shrimp", "1/3 cup ham, diced", "1/4 lb tofu, cubed",
            "1/4 lb chicken breasts, diced")
    k.group("veg", 2, 3, "1/4 cup peas", "1/2 carrot, diced", "1/4 cup corn",
            "1/4 red bell pepper, diced", "1/3 cup cabbage, shredded",
            "1/3 cup broccoli, chopped")
    k.add("1/2 clove garlic, minced", "1 tbsp vegetable oil", "1 tbsp soy sauce")
    k.group("last", 1, 2, "1/2 tsp sesame oil", "1 green onion, sliced", "1/2 tsp rice vinegar",
            "1/8 tsp black pepper")
    k.title(*(["{main:one} Fried Rice", "{main:one} Fried Rice with {veg}"] if k.has("main") else
              ["Vegetable Fried Rice", "Fried Rice with {veg}", "Egg Fried Rice with {veg}"]))
    k.tag("rice")
    pan = k.pick("a wok", "a large skillet")
    k.step(f"Heat half of the {{vegetable oil}} in {pan} over medium-high heat. Scramble the "
           f"{{egg}} for 1 minute and set aside.",
           f"In {pan}, scramble the {{egg}} in a little of the {{vegetable oil}} for 1 minute. "
           f"Remove to a plate.", minutes=1)
    if k.has("main"):
        k.step("Heat the remaining oil and stir-fry the {main} for {min}.",
               "Add the rest of the oil and cook the {main} for {min}, stirring.",
               minutes=(3, 4, 1) if k.has("shrimp", "ham") else (5, 6, 1))
        k.step("Add the {veg, garlic} and stir-fry until tender, {min}.",
               "Stir in the {veg, garlic} and cook over high heat for {min}.", minutes=(3, 5, 1))
    else:
        k.step("Heat the remaining oil and stir-fry the {veg, garlic} until tender, {min}.",
               "Add the rest of the oil and cook the {veg, garlic} over high heat for {min}.",
               minutes=(3, 5, 1))
    k.step("Add the {cooked rice}, press out the lumps, and fry for {min}.",
           "Stir in the {cooked rice} and fry for {min}, tossing often.", minutes=(3, 5, 1))
    k.step("Stir in the cooked {egg, soy sauce, last}, and serve.",
           "Return the {egg} to the pan with the {soy sauce, last}, toss, and serve.")


def pilaf(k: Kitchen) -> None:
    """A grain toasted, then cooked in broth under a lid."""
    k.serves(4, 6, 8)
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("allium", 1, 1, "1/4 onion, chopped", "1/2 shallot, minced", "1/2 green onion, sliced")
    k.group("grain", 1, 1, "1/4 cup rice, rinsed", "1/4 cup brown rice, rinsed",
            "1/4 cup bulgur", "1/4 cup quinoa, rinsed")
    k.group("spice", 1, 1, "1/8 tsp cinnamon", "1/8 tsp turmeric", "1/8 tsp cumin",
            "1/8 tsp coriander")
    k.group("broth", 1, 1, "1/2 cup chicken broth", "1/2 cup vegetable broth")
    k.group("sweet", 0, 1, "1 tbsp raisins", "1 tbsp cranberries", "1/4 carrot, grated",
            "2 tbsp peas")
    k.group("nut", 1, 1, "1 tbsp almonds, toasted", "1 tbsp walnuts, chopped",
            "1/2 tbsp pumpkin seeds, toasted", "1 tbsp pecans, chopped")
    k.add("1/2 tbsp parsley, chopped" if k.chance(50) else "1/2 tbsp cilantro, chopped")
    k.add("1/8 tsp salt")
    k.call("herb", "parsley", "cilantro")
    k.title("{grain:one} Pilaf with {nut}", "{spice:one} {grain:one} Pilaf",
            *(["{grain:one} Pilaf with {sweet, nut}"] * 2 if k.has("sweet") else
              ["Simple {grain:one} Pilaf"]))
    k.tag("side", "rice" if k.has("rice", "brown rice") else "grain")
    pot = k.pick("a saucepan with a lid", "a medium pot", "a heavy pot")
    k.step(f"Heat the {{fat}} in {pot} over medium heat and cook the {{allium}} for {{min}}.",
           f"In {pot}, cook the {{allium}} in the {{fat}} until soft, {{min}}.", minutes=(3, 5, 1))
    k.step("Add the {grain, spice} and stir for {min}.",
           "Stir in the {grain, spice} and toast for {min}.", minutes=(1, 3, 1))
    k.step("Pour in the {broth}, add the {salt}, cover, and simmer on low heat for {min}.",
           "Add the {broth, salt} and bring to a boil. Cover and cook on low for {min}.",
           minutes=40 if k.has("brown rice") else (15, 18, 1))
    k.step("Remove from the heat and let stand, covered, for {min}.",
           "Take off the heat and rest, covered, for {min}.", minutes=(5, 10, 5))
    k.step("Fluff with a fork and fold in the {sweet, nut, herb}.",
           "Stir in the {sweet, nut, herb} and serve.")


def grain_bowl(k: Kitchen) -> None:
    """A grain, a protein, vegetables and a dressing."""
    k.serves(2, 4)
    k.group("grain", 1, 1, "1/3 cup quinoa, rinsed", "1/3 cup brown rice, rinsed",
            "1/3 cup bulgur", "1/3 cup pearl barley")
    k.add("1 cup water" if k.has("pearl barley") else "2/3 cup water")
    k.group("protein", 1, 1, "1/4 can black beans, drained and rinsed",
            "1/4 can chickpeas, drained and rinsed", "1/4 lb tofu, cubed", "1 egg",
            "1 salmon fillet")
    k.group("veg", 2, 3, "1/2 carrot, grated", "1/4 cucumber, sliced", "1/2 avocado, sliced",
            "1 cup spinach", "1/4 cup corn, thawed", "1/2 cup cherry tomatoes, halved",
            "1/2 cup cabbage, shredded")
    k.group("sauce", 1, 1, "1 tbsp tahini", "1/2 tbsp peanut butter", "2 tbsp Greek yogurt",
            "1 tbsp olive oil")
    k.group("sour", 1, 1, "1/2 tbsp lemon juice", "1/2 tbsp lime juice", "1/2 tbsp rice vinegar")
    k.group("salty", 1, 1, "1 tsp soy sauce", "1/8 tsp salt")
    k.group("top", 0, 1, "1/2 tbsp sesame seeds", "1/2 tbsp pumpkin seeds", "1 green onion, sliced")
    k.title("{grain:one} Bowl with {protein}", "{protein:one} {grain:one} Bowl with {sauce}",
            "{protein:one} and {veg:one} Bowl" if k.count("veg") == 2 else
            "{protein:one} Grain Bowl")
    k.tag("bowl")
    long = k.has("brown rice", "pearl barley")
    k.step("Simmer the {grain} in the {water}, covered, until tender, about {min}.",
           "Bring the {water} to a boil, add the {grain}, cover, and cook on low for {min}.",
           minutes=(35, 40, 5) if long else (14, 16, 1))
    if k.has("egg"):
        k.step("Boil the {egg} for {min}, cool, peel, and halve.", minutes=(7, 9, 1))
    elif k.has("salmon fillet"):
        k.step("Broil the {salmon fillet} for {min}, until the fish flakes.", minutes=(8, 10, 1))
    elif k.has("tofu"):
        k.step("Brown the {tofu} in a dry nonstick skillet for {min}, turning often.",
               minutes=(7, 9, 1))
    else:
        k.step("Warm the {protein} in a small pan for {min}.", minutes=(3, 5, 1))
    k.step("Whisk the {sauce, sour, salty} with a spoonful of warm water.",
           "Stir the {sauce, sour, salty} to a smooth dressing.")
    k.step("Divide the {grain} among bowls and top with the {protein, veg}.",
           "Spoon the {grain} into bowls and arrange the {protein, veg} on top.")
    k.step("Drizzle with the dressing and sprinkle with the {top}." if k.has("top") else
           "Drizzle with the dressing and serve.")


def stuffed_peppers(k: Kitchen) -> None:
    """Bell peppers, or zucchini, baked with a grain filling."""
    k.serves(2, 4, 6)
    k.group("shell", 1, 1, "1 red bell pepper", "1 green bell pepper", "1 zucchini")
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped", "1/2 clove garlic, minced")
    k.group("fill", 1, 1, "3 oz ground beef", "3 oz ground turkey",
            "1/4 can black beans, drained and rinsed", "1/2 cup mushrooms, chopped",
            "1/4 can chickpeas, drained and rinsed")
    k.add("1/3 cup cooked rice")
    k.group("wet", 1, 1, "2 tbsp salsa", "1/4 cup crushed tomatoes", "1/4 can diced tomatoes")
    k.group("spice", 1, 1, "1/4 tsp cumin", "1/4 tsp oregano", "1/4 tsp paprika",
            "1/4 tsp chili powder")
    k.add("1/8 tsp salt")
    k.group("cheese", 1, 1, "2 tbsp cheddar cheese", "2 tbsp mozzarella cheese",
            "1 tbsp feta cheese", "1 tbsp Parmesan cheese")
    name = "Stuffed {shell}"
    k.title(f"{name} with {{fill}}", f"{{fill:one}} {name}", f"{name} with {{fill, cheese}}")
    k.tag("main", "baked")
    preheat(k, 350, 400, "lightly oil a baking dish")
    k.step("Halve the {shell} lengthwise, scoop out the centers, and place in the dish.",
           "Cut the {shell} in half, remove the seeds, and arrange in the dish.")
    k.step("Heat the {olive oil} in a skillet and cook the {onion, fill} for {min}.",
           "In a skillet, cook the {onion, fill} in the {olive oil} for {min}.",
           minutes=(6, 8, 1))
    k.step("Stir in the {garlic, cooked rice, wet, spice, salt} and cook for {min}.",
           "Add the {garlic, cooked rice, wet, spice, salt}. Stir for {min}.", minutes=(2, 4, 1))
    k.step("Fill the {shell} with the mixture and top with the {cheese}.",
           "Spoon the filling into the {shell} and sprinkle with the {cheese}.")
    k.step("Bake until tender and golden, about {min}.",
           "Cover with foil and bake for {min}.", minutes=(25, 35, 5))


FAMILIES: tuple[Family, ...] = (
    risotto,
    fried_rice,
    pilaf,
    grain_bowl,
    stuffed_peppers,
)

"""Salads and vegetable dishes."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat, salt_and_pepper
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def _dressing(k: Kitchen) -> None:
    """List a dressing as the groups acid and accent, with oil, salt and pepper."""
    k.add("1 tbsp olive oil")
    k.group("acid", 1, 1, "1/2 tbsp lemon juice", "1/2 tbsp red wine vinegar",
            "1/2 tbsp balsamic vinegar", "1/2 tbsp apple cider vinegar", "1/2 tbsp lime juice")
    k.group("accent", 1, 1, "1/2 tsp Dijon mustard", "1/2 tsp honey", "1/4 clove garlic, minced",
            "1/4 shallot, minced", "1/2 tsp maple syrup")
    k.add("1/16 tsp salt", "1/16 tsp black pepper")


def _whisk(k: Kitchen) -> None:
    k.step("Whisk the {olive oil, acid, accent, salt, black pepper} in a large bowl.",
           "In a large bowl, whisk together the {olive oil, acid, accent, salt, black pepper}.",
           "Shake the {olive oil, acid, accent, salt, black pepper} in a jar and pour into a "
           "large bowl.")


def green_salad(k: Kitchen) -> None:
    """Leaves with fruit or vegetables, cheese and nuts."""
    k.serves(2, 4, 6)
    _dressing(k)
    k.group("leaf", 1, 1, "2 cup spinach", "2 cup arugula", "2 cup romaine lettuce, chopped",
            "2 cup kale, thinly sliced")
    k.group("veg", 1, 2, "1/4 cucumber, sliced", "1/2 cup cherry tomatoes, halved",
            "1/2 apple, sliced", "1/2 pear, sliced", "1/2 cup strawberries, sliced",
            "1/2 carrot, grated", "1/4 avocado, sliced", "1/2 beet, cooked and sliced")
    k.group("cheese", 0, 1, "1 tbsp feta cheese", "1/2 oz goat cheese", "1 tbsp Parmesan cheese")
    k.group("nut", 1, 1, "1 tbsp walnuts, chopped", "1 tbsp almonds, chopped",
            "1 tbsp pecans, chopped", "1 tbsp pumpkin seeds")
    k.title("{leaf:one} Salad with {veg}", "{leaf:one} and {veg:one} Salad" if k.count("veg") == 1
            else "{leaf:one} Salad with {veg, nut}",
            *(["{leaf:one} Salad with {cheese, nut}"] if k.has("cheese") else
              ["Simple {leaf:one} Salad with {nut}"]))
    k.tag("salad", "no-cook")
    if k.chance(50):
        k.step("Toast the {nut} in a dry skillet over medium heat for {min}.",
               minutes=(3, 5, 1))
    _whisk(k)
    k.step("Rub the dressing into the {leaf} with your hands." if k.has("kale") else
           "Add the {leaf} and toss to coat.", "Toss the {leaf} with the dressing.")
    k.step("Top with the {veg, cheese, nut} and serve at once.",
           "Scatter the {veg, cheese, nut} on top.",
           "Add the {veg, cheese, nut}, toss once more, and serve.")


def bean_salad(k: Kitchen) -> None:
    """Beans with raw vegetables and herbs."""
    k.serves(4, 6)
    _dressing(k)
    k.group("bean", 1, 2, "1/4 can chickpeas, drained and rinsed",
            "1/4 can white beans, drained and rinsed", "1/4 can black beans, drained and rinsed",
            "1/4 can kidney beans, drained and rinsed")
    k.group("veg", 2, 3, "1/4 cucumber, diced", "1/4 cup cherry tomatoes, halved",
            "1/4 red bell pepper, diced", "1/8 red onion, finely chopped",
            "1/4 cup corn, thawed", "1/2 stalk celery, sliced")
    k.group("herb", 1, 1, "1 tbsp parsley, chopped", "1 tbsp cilantro, chopped",
            "1 tbsp basil, sliced", "1/2 tbsp mint, chopped")
    k.group("cheese", 0, 1, "1 tbsp feta cheese", "1 tbsp olives")
    k.title("{bean:one} Salad" if k.count("bean") == 1 else "Two-Bean Salad with {herb}",
            "{bean:one} Salad with {veg}" if k.count("bean") == 1 else "Two-Bean Salad with {veg}",
            "{bean:one} and {herb:one} Salad" if k.count("bean") == 1 else "Easy Two-Bean Salad")
    k.tag("salad", "no-cook")
    _whisk(k)
    k.step("Add the {bean, veg} and stir to coat.", "Stir in the {bean, veg}.",
           "Fold in the {bean, veg}.")
    k.step("Let stand for {min} so that the flavors blend.", "Chill for {min}.",
           minutes=(10, 30, 10))
    k.step("Fold in the {herb, cheese} before serving.", "Stir in the {herb, cheese} and serve.",
           "Sprinkle with the {herb, cheese}.")


def grain_salad(k: Kitchen) -> None:
    """A cooked grain or pasta, cold, with vegetables."""
    k.serves(4, 6)
    k.group("grain", 1, 1, "1/4 cup quinoa, rinsed", "1/4 cup bulgur", "1/4 cup couscous",
            "1/4 cup pearl barley", "1/3 cup macaroni")
    k.add("3/4 cup water" if k.has("pearl barley", "macaroni") else "1/3 cup water"
          if k.has("couscous") else "1/2 cup water")
    _dressing(k)
    k.group("veg", 2, 3, "1/4 cucumber, diced", "1/4 cup cherry tomatoes, halved",
            "1/4 red bell pepper, diced", "1/2 green onion, sliced", "2 tbsp peas, thawed",
            "1/4 carrot, grated", "1/4 avocado, diced")
    k.group("add", 1, 2, "1 tbsp raisins", "1 tbsp cranberries", "1 tbsp feta cheese",
            "1 tbsp almonds, chopped", "1 tbsp olives", "1 tbsp walnuts, chopped")
    k.group("herb", 1, 1, "1 tbsp parsley, chopped", "1/2 tbsp mint, chopped",
            "1/2 tbsp dill, chopped", "1 tbsp basil, sliced")
    k.title("{grain:one} Salad with {veg}", "{grain:one} Salad with {add}",
            "{herb:one} {grain:one} Salad", "{grain:one} Salad with {add, herb}")
    k.tag("salad")
    if k.has("couscous"):
        k.step("Boil the {water}, pour it over the {grain}, cover, and let stand for {min}.",
               minutes=(5, 8, 1))
    elif k.has("macaroni"):
        k.step("Boil the {water} in a pot, cook the {grain} for {min}, and drain.", minutes=(8, 9,
                                                                                             1))
    else:
        k.step("Bring the {water} to a boil, add the {grain}, cover, and simmer for {min}.",
               "Simmer the {grain} in the {water}, covered, until tender, {min}.",
               minutes=(30, 35, 5) if k.has("pearl barley") else (13, 16, 1))
    k.step("Spread the {grain} on a plate to cool for {min}.", "Let the {grain} cool for {min}.",
           minutes=(10, 15, 5))
    _whisk(k)
    k.step("Add the {grain, veg, add} and toss.", "Stir in the {grain, veg, add}.")
    k.step("Fold in the {herb} and serve cold.", "Sprinkle with the {herb} and serve.")


def slaw(k: Kitchen) -> None:
    """Shredded vegetables in a creamy or sharp dressing."""
    k.serves(4, 6, 8)
    k.group("cream", 1, 1, "1 tbsp mayonnaise", "1 tbsp Greek yogurt", "1 tbsp sour cream",
            "1/2 tbsp sesame oil")
    k.group("acid", 1, 1, "1/2 tbsp apple cider vinegar", "1/2 tbsp lime juice",
            "1/2 tbsp lemon juice", "1/2 tbsp rice vinegar")
    k.group("sweet", 1, 1, "1/2 tsp honey", "1/2 tsp sugar", "1/2 tsp maple syrup")
    k.add("1/16 tsp salt", "1/16 tsp black pepper", "3/4 cup cabbage, shredded")
    k.group("veg", 1, 2, "1/4 carrot, grated", "1/4 apple, cut into thin strips",
            "1/2 green onion, sliced", "1/8 red onion, thinly sliced", "1/4 cup kale, shredded",
            "1/4 red bell pepper, thinly sliced")
    k.group("end", 1, 1, "1 tbsp cilantro, chopped", "1 tbsp peanuts, chopped", "1 tbsp raisins",
            "1/2 tbsp sesame seeds", "1 tbsp parsley, chopped", "1 tbsp cranberries")
    k.title("Cabbage and {veg:one} Slaw" if k.count("veg") == 1 else "Cabbage Slaw with {veg}",
            "Cabbage Slaw with {end}", "{sweet:one} and {acid:one} Slaw", "Crunchy Cabbage Slaw")
    k.tag("salad", "side", "no-cook")
    k.step("Whisk the {cream, acid, sweet, salt, black pepper} in a large bowl.",
           "In a large bowl, stir together the {cream, acid, sweet, salt, black pepper}.")
    k.step("Add the {cabbage, veg} and toss well.", "Toss in the {cabbage, veg}.",
           "Mix in the {cabbage, veg} with your hands.")
    k.step("Chill for {min}, then stir in the {end}.",
           "Refrigerate for {min}. Stir and top with the {end}.", minutes=(15, 45, 15))


def potato_salad(k: Kitchen) -> None:
    """Boiled potatoes in a creamy or sharp dressing."""
    k.serves(4, 6, 8)
    k.add("1 potato, peeled and cubed|cut into chunks", "1/8 tsp salt")
    k.add("1 cup water", eaten=0.0)
    k.group("cream", 1, 1, "3/2 tbsp mayonnaise", "3/2 tbsp sour cream", "2 tbsp Greek yogurt",
            "1 tbsp olive oil")
    k.group("sharp", 1, 1, "1/2 tsp Dijon mustard", "1 tsp apple cider vinegar",
            "1 tsp lemon juice",
            "1 tsp red wine vinegar")
    k.group("crunch", 1, 2, "1/4 stalk celery, diced", "1/8 red onion, finely chopped",
            "1/2 green onion, sliced", "1/2 egg, boiled and chopped", "1 slice bacon, cooked",
            "2 tbsp peas, thawed")
    k.group("herb", 1, 1, "1 tsp dill, chopped", "1 tsp chives, chopped",
            "1/2 tbsp parsley, chopped")
    k.add("1/16 tsp black pepper")
    k.title("Potato Salad with {crunch}", "{herb:one} Potato Salad", "Potato Salad with {sharp}",
            "Picnic Potato Salad with {herb}")
    k.tag("salad", "side")
    k.step("Boil the {potato} in the {water} with the {salt} until tender, about {min}, and drain.",
           "Put the {potato, water, salt} in a pot, boil for {min}, and drain.",
           minutes=(12, 16, 1))
    k.step("Whisk the {cream, sharp, black pepper} in a large bowl.",
           "In a large bowl, stir the {cream, sharp, black pepper}.")
    k.step("Add the {potato, crunch} and fold gently.", "Fold in the {potato, crunch}.")
    k.step("Sprinkle with the {herb} and serve warm or cold.",
           "Chill, then stir in the {herb} before serving.")


def roasted_vegetables(k: Kitchen) -> None:
    """One or two vegetables roasted with spice."""
    k.serves(2, 4, 6)
    k.group("veg", 1, 2, "1 carrot, cut into sticks", "3/4 cup cauliflower, cut into florets",
            "3/4 cup broccoli, cut into florets", "1/2 potato, cubed", "1/2 sweet potato, cubed",
            "3/4 cup butternut squash, cubed", "1 beet, cut into wedges",
            "3/4 cup green beans, trimmed", "3/4 cup asparagus, trimmed",
            "3/4 cup mushrooms, halved")
    k.group("onion", 0, 1, "1/4 red onion, cut into wedges", "1/2 shallot, halved")
    k.add("1/2 tbsp olive oil")
    k.group("spice", 1, 1, "1/4 tsp cumin", "1/4 tsp smoked paprika", "1/4 tsp thyme",
            "1/4 tsp rosemary", "1/4 tsp curry powder", "1/4 tsp coriander")
    salt_and_pepper(k)
    k.group("end", 1, 1, "1 tsp lemon juice", "1 tsp balsamic vinegar", "1/2 tbsp parsley, chopped",
            "1 tbsp Parmesan cheese", "1/2 tbsp honey", "1/2 tbsp tahini", "1 tbsp feta cheese")
    k.title("Roasted {veg} with {end}", "{spice:one} Roasted {veg}", "Roasted {veg}",
            "Oven-Roasted {veg} with {spice}")
    k.tag("side", "baked")
    preheat(k, 400, 425, "line a baking sheet with parchment paper")
    k.step("Toss the {veg, onion} with the {olive oil, spice, salt, black pepper} on the sheet.",
           "On the sheet, mix the {veg, onion} with the {olive oil, spice, salt, black pepper}.")
    quick = not k.has("carrot", "cauliflower", "potato", "sweet potato", "butternut squash", "beet")
    k.step("Roast, stirring once, until brown at the edges, about {min}.",
           "Spread out and roast for {min}, until tender and browned.",
           minutes=(12, 18, 2) if quick else (25, 35, 5))
    k.step("Finish with the {end} and serve.", "Toss with the {end} and serve warm.")


def gratin(k: Kitchen) -> None:
    """Vegetables baked in cream under cheese."""
    k.serves(4, 6)
    k.group("veg", 1, 1, "1 potato, peeled and thinly sliced",
            "1 sweet potato, peeled and thinly sliced", "3/2 cup cauliflower, cut into florets",
            "1 leek, sliced", "3/2 cup broccoli, cut into florets", "1 zucchini, sliced")
    k.add("1/2 tbsp butter")
    k.group("allium", 1, 1, "1/2 clove garlic, minced", "1/4 onion, thinly sliced",
            "1/2 shallot, minced")
    k.group("cream", 1, 1, "1/4 cup cream", "1/3 cup milk")
    if k.has("milk"):
        k.add("1/2 tbsp flour")
    k.group("spice", 1, 1, "1/16 tsp nutmeg", "1/8 tsp thyme", "1/4 tsp Dijon mustard",
            "1/8 tsp rosemary")
    salt_and_pepper(k)
    k.group("cheese", 1, 1, "1/4 cup Swiss cheese", "1/4 cup cheddar cheese",
            "2 tbsp Parmesan cheese")
    if k.chance(40):
        k.add("1 tbsp bread crumbs")
    k.call("top", "Swiss cheese", "cheddar cheese", "Parmesan cheese", "bread crumb")
    k.title("{veg:one} Gratin", "{veg:one} Gratin with {cheese}", "Creamy {veg:one} Gratin",
            "{veg:one} and {cheese:one} Gratin")
    k.tag("side", "baked")
    preheat(k, 350, 375, "set out a baking dish")
    k.step("Melt the {butter} in a saucepan and cook the {allium} for {min}.",
           "In a saucepan, cook the {allium} in the {butter} for {min}.", minutes=(2, 4, 1))
    if k.has("flour"):
        k.step("Stir in the {flour}, then whisk in the {cream, spice, salt, black pepper} and "
               "simmer for {min}.", minutes=(2, 4, 1))
    else:
        k.step("Add the {cream, spice, salt, black pepper} and bring to a simmer.",
               "Stir in the {cream, spice, salt, black pepper} and heat until steaming.")
    k.step("Layer the {veg} in the dish and pour the sauce over.",
           "Put the {veg} in the dish and cover with the sauce.")
    k.step("Sprinkle with the {top} and bake until tender and golden, about {min}.",
           "Top with the {top}. Bake for {min}, until bubbling and brown.",
           minutes=(45, 60, 5) if k.has("potato", "sweet potato") else (25, 35, 5))


def mashed_potatoes(k: Kitchen) -> None:
    """Mashed roots or cauliflower."""
    k.serves(4, 6)
    if k.chance(60):
        k.group("root", 1, 1, "1 potato, peeled and cubed", "1 sweet potato, peeled and cubed",
                "3/2 cup cauliflower, cut into florets", "3/2 carrot, peeled and sliced")
    else:
        k.group("root", 2, 2, "1/2 potato, peeled and cubed", "1/2 sweet potato, peeled and cubed",
                "3/4 cup cauliflower, cut into florets", "3/4 carrot, peeled and sliced")
    k.add("3/2 cup water", eaten=0.0)
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("milk", 1, 1, "2 tbsp milk", "1 tbsp cream", "2 tbsp buttermilk", "1 tbsp sour cream")
    k.group("flavor", 1, 2, "1/2 clove garlic, peeled", "1/2 tbsp chives, chopped",
            "1 tbsp Parmesan cheese", "1/16 tsp nutmeg", "1/2 tsp Dijon mustard")
    salt_and_pepper(k)
    k.title("Mashed {root} with {flavor}", "Creamy Mashed {root}", "{flavor:one} Mashed {root}"
            if k.count("flavor") == 1 else "Mashed {root}")
    k.tag("side")
    k.call("boiled", "potato", "sweet potato", "cauliflower", "carrot", "garlic")
    k.call("late", "chive", "Parmesan cheese", "nutmeg", "Dijon mustard")
    k.step("Simmer the {boiled} in the {water} until very tender, about {min}, and drain.",
           "Put the {boiled, water} in a pot, boil for {min}, and drain well.",
           minutes=(15, 20, 1))
    k.step("Heat the {fat, milk} in a small pot until warm.", "Warm the {fat, milk} together.")
    k.step("Mash, stir in the warm mixture, and season with the {salt, black pepper}.",
           "Add the warm mixture and mash until smooth. Season with the {salt, black pepper}.")
    if k.has("late"):
        k.step("Stir in the {late} and serve hot.", "Fold in the {late}.")


FAMILIES: tuple[Family, ...] = (
    green_salad,
    bean_salad,
    grain_salad,
    slaw,
    potato_salad,
    roasted_vegetables,
    gratin,
    mashed_potatoes,
)

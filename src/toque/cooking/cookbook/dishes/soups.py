"""Soups."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import bloom, salt_and_pepper, season, soften
from toque.cooking.cookbook.recipe_builder import Family, Kitchen

_POT = ("a large pot", "a soup pot", "a Dutch oven")


def lentil_soup(k: Kitchen) -> None:
    """Lentils simmered with roots and spices."""
    k.serves(2, 4, 6, 8)
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped|diced|finely chopped")
    k.group("base", 1, 2, "1/2 carrot, diced|sliced", "1/2 stalk celery, sliced|diced")
    k.add("1/2 clove garlic, minced|crushed")
    k.group("spice", 1, 2, "1/4 tsp cumin", "1/4 tsp smoked paprika", "1/4 tsp turmeric",
            "1/4 tsp curry powder", "1/4 tsp coriander")
    if spicy := k.chance(40):
        k.add("1/8 tsp red pepper flakes")
    k.group("lentil", 1, 1, "1/4 cup lentils, rinsed", "1/4 cup red lentils, rinsed")
    k.add("3/2 cup vegetable broth")
    if k.chance(50):
        k.add("1/4 can diced tomatoes")
    k.group("green", 0, 1, "1/2 cup spinach", "1/2 cup kale, chopped")
    k.group("sour", 0, 1, "1 tsp lemon juice", "1 tsp red wine vinegar")
    salt_and_pepper(k)
    k.title(*([f"{'Spicy ' if spicy else ''}{{lentil:one}} Soup with {{green}}"]
              if k.has("green") else []),
            f"{k.pick('Spicy' if spicy else 'Simple', 'Hearty')} {{lentil:one}} Soup",
            f"{'Spicy ' if spicy else ''}{{lentil:one}} Soup with {{base}}")
    k.tag("soup")
    soften(k, k.pick(*_POT), "olive oil", "onion", "base")
    bloom(k, "garlic", "spice", *(["red pepper flake"] if spicy else []))
    wet = "{lentil, vegetable broth, diced tomato}"
    k.step(f"Add the {wet} and bring to a boil. Reduce the heat and simmer for {{min}}.",
           f"Pour in the {wet}. Simmer, partly covered, until the lentils are soft, {{min}}.",
           f"Stir in the {wet}, bring to a boil, then simmer gently for {{min}}.",
           minutes=(20, 35, 5))
    if k.has("green"):
        k.step("Stir in the {green} and cook until wilted, {min}.",
               "Add the {green} and simmer for {min}.", minutes=(2, 4, 1))
    if k.has("sour"):
        k.step("Remove from the heat and stir in the {sour}.",
               "Take the pot off the heat and add the {sour}.")
    season(k)


def bean_soup(k: Kitchen) -> None:
    """Canned beans, half of them crushed."""
    k.serves(2, 4, 6)
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped|diced")
    k.group("base", 1, 3, "1/2 carrot, diced", "1/2 stalk celery, diced",
            "1/4 green bell pepper, chopped", "1/4 red bell pepper, chopped")
    k.add("1/2 clove garlic, minced|sliced")
    k.group("spice", 1, 2, "1/4 tsp cumin", "1/4 tsp oregano", "1/4 tsp chili powder",
            "1/4 tsp thyme", "1/4 tsp smoked paprika")
    k.group("bean", 1, 1, "1/2 can black beans, drained and rinsed",
            "1/2 can white beans, drained and rinsed", "1/2 can kidney beans, drained and rinsed")
    k.group("broth", 1, 1, "1 cup vegetable broth", "1 cup chicken broth")
    k.group("herb", 0, 1, "1 tbsp cilantro, chopped", "1 tbsp parsley, chopped",
            "1/2 tbsp chives, chopped")
    salt_and_pepper(k)
    k.title("{bean:one} Soup", "Country {bean:one} Soup",
            "Thick {bean:one} Soup", "{bean:one} Soup with {base}")
    k.tag("soup", "one-pot")
    soften(k, k.pick(*_POT), "olive oil", "onion", "base")
    bloom(k, "garlic", "spice")
    k.step("Add the {bean, broth} and simmer for {min}.",
           "Stir in the {bean, broth}, bring to a boil, and simmer for {min}.",
           minutes=(15, 25, 5))
    k.step("Crush some of the {bean} with a spoon to thicken the soup.",
           "Mash about half of the {bean} against the side of the pot.",
           "Blend half of the soup until smooth and return it to the pot.")
    season(k, "herb")


def creamy_vegetable_soup(k: Kitchen) -> None:
    """One vegetable, blended smooth."""
    k.serves(2, 4, 6)
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.group("allium", 1, 1, "1/4 onion, chopped", "1/2 leek, sliced", "1 shallot, chopped")
    k.group("main", 1, 1, "1 cup butternut squash, peeled and cubed", "1 cup cauliflower, chopped",
            "3/2 carrot, peeled and sliced", "1 cup broccoli, chopped",
            "3/2 cup mushrooms, sliced", "3/4 sweet potato, peeled and cubed",
            "3/4 potato, peeled and cubed")
    k.group("spice", 1, 1, "1/8 tsp nutmeg", "1/4 tsp thyme", "1/4 tsp cumin",
            "1/4 tsp curry powder", "1/2 tsp ginger, grated")
    k.group("broth", 1, 1, "1 cup vegetable broth", "1 cup chicken broth")
    k.group("cream", 1, 1, "2 tbsp cream", "1/4 cup coconut milk", "1/4 cup milk")
    k.group("garnish", 0, 1, "1/2 tbsp chives, chopped", "1/2 tbsp parsley, chopped",
            "1/2 tbsp pumpkin seeds, toasted")
    salt_and_pepper(k)
    k.title("Creamy {main:one} Soup", "Cream of {main:one} Soup", "Smooth {main:one} Soup",
            "{main:one} Soup with {spice}")
    k.tag("soup")
    if k.has("butter"):
        k.step("Melt the {fat} in a large pot over medium heat. Cook the {allium} until soft, "
               "{min}.", "In a soup pot, melt the {fat} and cook the {allium} for {min}.",
               minutes=(4, 7, 1))
    else:
        soften(k, k.pick(*_POT), "fat", "allium")
    k.step("Add the {main, spice} and stir for {min}.",
           "Stir in the {main, spice} and cook for {min}.", minutes=(2, 5, 1))
    k.step("Pour in the {broth}, bring to a boil, and simmer until the {main} {main:is} very "
           "tender, about {min}.",
           "Add the {broth} and simmer, covered, for {min}, until the {main} {main:is} soft.",
           minutes=(15, 25, 5))
    k.step("Blend the soup until smooth and stir in the {cream}.",
           "Puree with a blender until smooth, then add the {cream} and heat gently.",
           "Blend until very smooth. Return to the pot and stir in the {cream}.")
    season(k, "garnish")


def chicken_noodle_soup(k: Kitchen) -> None:
    """Chicken, roots and noodles in broth."""
    k.serves(4, 6, 8)
    k.group("fat", 1, 1, "1 tsp olive oil", "1 tsp butter")
    k.add("1/4 onion, chopped|diced", "1/2 carrot, sliced|diced", "1/2 stalk celery, sliced")
    k.add("1/2 clove garlic, minced")
    k.group("herb", 1, 1, "1/8 tsp thyme", "1/8 tsp oregano", "1/8 tsp rosemary")
    k.add("3/2 cup chicken broth")
    k.group("chicken", 1, 1, "1/4 lb chicken breasts", "1/4 lb chicken thighs")
    k.group("noodle", 1, 1, "1/2 cup egg noodles", "1/4 cup macaroni", "3 tbsp rice, rinsed")
    k.group("green", 0, 1, "2 tbsp peas", "1/4 cup spinach", "2 tbsp corn")
    k.group("garnish", 0, 1, "1/2 tbsp parsley, chopped", "1/2 tbsp dill, chopped")
    salt_and_pepper(k)
    kind = "Rice" if k.has("rice") else "Noodle"
    k.title(f"Chicken {kind} Soup", f"Chicken {kind} Soup with {{carrot, celery}}",
            f"Homestyle Chicken {kind} Soup",
            *([f"Chicken {kind} Soup with {{green}}"] if k.has("green") else []))
    k.tag("soup", "one-pot")
    soften(k, k.pick(*_POT), "fat", "onion", "carrot", "celery")
    bloom(k, "garlic", "herb")
    k.step("Add the {chicken broth, chicken}. Bring to a boil, then simmer for {min}, until the "
           "chicken is cooked through.",
           "Pour in the {chicken broth}, add the {chicken}, and simmer gently for {min}.",
           minutes=(15, 20, 1))
    k.step("Lift out the {chicken}, shred the meat with two forks, and set aside.",
           "Remove the {chicken} to a board and shred the meat.")
    k.step("Stir the {noodle} into the simmering broth and cook until tender, {min}.",
           "Add the {noodle} to the pot and cook for {min}.",
           minutes=(14, 16, 1) if k.has("rice") else (7, 9, 1))
    k.step("Return the {chicken} to the pot with the {green} and heat for {min}."
           if k.has("green") else "Return the {chicken} to the pot and heat for {min}.",
           minutes=(2, 4, 1))
    season(k, "garnish")


def chowder(k: Kitchen) -> None:
    """Potatoes and corn or fish in thickened milk."""
    k.serves(4, 6)
    if k.chance(45):
        k.add("1 slice bacon, chopped")
    k.add("1/2 tbsp butter", "1/4 onion, chopped|diced", "1/2 stalk celery, sliced|diced")
    k.add("1 tbsp flour", "3/4 potato, peeled and diced")
    k.group("broth", 1, 1, "3/4 cup chicken broth", "3/4 cup vegetable broth")
    k.add("1/2 cup milk")
    k.group("main", 1, 1, "1/2 cup corn", "1 cod fillet, cut into chunks", "1/4 lb shrimp",
            "1/4 lb salmon fillets, cut into chunks")
    k.add("1/8 tsp thyme")
    k.group("garnish", 0, 1, "1/2 tbsp chives, chopped", "1/2 tbsp parsley, chopped")
    salt_and_pepper(k)
    name = {"corn": "Corn", "cod fillet": "Fish", "shrimp": "Shrimp"}
    main = next((word for key, word in name.items() if k.has(key)), "Salmon")
    k.title(f"{main} Chowder", f"{main} and Potato Chowder", f"Creamy {main} Chowder",
            *([f"{main} Chowder with Bacon"] if k.has("bacon") else []))
    k.tag("soup")
    if k.has("bacon"):
        k.step("Cook the {bacon} in a large pot over medium heat until crisp, about {min}.",
               "In a soup pot, fry the {bacon} for {min}, until crisp.", minutes=(5, 7, 1))
    k.step("Add the {butter, onion, celery} and cook until soft, {min}."
           if k.has("bacon") else
           "Melt the {butter} in a large pot and cook the {onion, celery} for {min}.",
           minutes=(5, 8, 1))
    k.step("Stir in the {flour} and cook for {min}.",
           "Sprinkle in the {flour} and stir for {min}.", minutes=(1, 2, 1))
    k.step("Slowly whisk in the {broth}. Add the {potato, thyme} and simmer for {min}, until the "
           "potatoes are tender.",
           "Pour in the {broth} while stirring, add the {potato, thyme}, and simmer for {min}.",
           minutes=(12, 18, 1))
    k.step("Stir in the {milk, main} and cook gently for {min} without boiling.",
           "Add the {milk, main} and heat for {min}; do not boil.", minutes=(5, 8, 1))
    season(k, "garnish")


def tomato_soup(k: Kitchen) -> None:
    """Canned tomatoes, blended."""
    k.serves(4, 8)
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp olive oil")
    k.add("1/4 onion, chopped|sliced", "1/2 clove garlic, minced|smashed")
    k.group("extra", 0, 1, "1/2 carrot, sliced", "1/4 red bell pepper, chopped",
            "1 tbsp tomato paste")
    k.add("1/4 can crushed tomatoes")
    k.group("broth", 1, 1, "1/2 cup vegetable broth", "1/2 cup chicken broth")
    k.group("herb", 1, 1, "1/8 tsp oregano", "1/8 tsp thyme", "1/8 tsp rosemary")
    k.add("1/2 tsp sugar")
    k.group("cream", 0, 1, "1 tbsp cream", "2 tbsp coconut milk", "2 tbsp milk")
    k.group("garnish", 0, 1, "1 tbsp basil, torn|sliced", "1 tbsp Parmesan cheese",
            "1/2 tbsp pesto")
    salt_and_pepper(k)
    k.title("Tomato Soup", f"{k.pick('Simple', 'Classic', 'Homestyle')} Tomato Soup",
            *(["Creamy Tomato Soup"] if k.has("cream") else []),
            *(["Tomato Soup with {garnish}"] if k.has("garnish") else []),
            *(["Tomato and {extra:one} Soup"] if k.has("carrot", "red bell pepper") else []))
    k.tag("soup")
    soften(k, k.pick(*_POT), "fat", "onion", *(["extra"] if k.has("extra") else []))
    bloom(k, "garlic", "herb")
    k.step("Add the {crushed tomato, broth, sugar} and simmer for {min}.",
           "Stir in the {crushed tomato, broth, sugar}. Bring to a boil and simmer for {min}.",
           minutes=(15, 30, 5))
    k.step("Blend the soup until smooth and stir in the {cream}." if k.has("cream") else
           "Blend the soup until smooth.",
           "Puree until smooth, then add the {cream}." if k.has("cream") else
           "Puree with a blender until smooth.")
    season(k, "garnish")


FAMILIES: tuple[Family, ...] = (
    lentil_soup,
    bean_soup,
    creamy_vegetable_soup,
    chicken_noodle_soup,
    chowder,
    tomato_soup,
)

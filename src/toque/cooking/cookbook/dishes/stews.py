"""Stews, chilis, curries and braises."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import bloom, salt_and_pepper, season, soften
from toque.cooking.cookbook.recipe_builder import Family, Kitchen

_POT = ("a large pot", "a Dutch oven", "a heavy pot")


def beef_stew(k: Kitchen) -> None:
    """Beef, roots and broth, long simmered."""
    k.serves(4, 6, 8)
    k.add("1/3 lb stewing beef, cut into chunks|cut into cubes", "1/2 tbsp flour")
    salt_and_pepper(k)
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped", "1/2 clove garlic, minced")
    k.add("1/2 tbsp tomato paste", "1 cup beef broth")
    k.group("herb", 1, 1, "1/8 tsp thyme", "1/8 tsp rosemary", "1/8 tsp oregano")
    k.group("root", 2, 3, "1/2 carrot, cut into chunks", "1/2 potato, cut into chunks",
            "1/2 stalk celery, sliced", "1/2 cup mushrooms, halved",
            "1/2 cup butternut squash, cubed")
    k.group("late", 0, 1, "2 tbsp peas", "1/4 cup green beans, trimmed")
    k.title("Beef Stew with {root}", "Hearty Beef Stew", "Slow Beef and {herb} Stew",
            *(["Beef Stew with {late}"] if k.has("late") else []))
    k.tag("stew", "one-pot")
    k.step("Toss the {stewing beef} with the {flour, salt, black pepper}.",
           "Season the {stewing beef} with the {salt, black pepper} and coat with the {flour}.")
    pot = k.pick(*_POT)
    k.step(f"Heat the {{olive oil}} in {pot} over medium-high heat and brown the beef on all "
           f"sides, about {{min}}.",
           f"In {pot}, heat the {{olive oil}} and brown the beef in batches for {{min}}.",
           minutes=(8, 10, 1))
    k.step("Add the {onion, garlic} and cook for {min}, then stir in the {tomato paste}.",
           "Stir in the {onion, garlic, tomato paste} and cook for {min}.", minutes=(4, 6, 1))
    k.step("Pour in the {beef broth}, add the {herb}, cover, and simmer for {min}.",
           "Add the {beef broth, herb}. Cover and simmer on low heat for {min}.",
           minutes=(60, 90, 30))
    k.step("Add the {root} and simmer until the beef and vegetables are tender, about {min}.",
           "Stir in the {root} and cook, covered, for {min}, until everything is tender.",
           minutes=(30, 40, 5))
    if k.has("late"):
        k.step("Stir in the {late} and cook for {min} before serving.",
               "Add the {late}, simmer for {min}, and serve.", minutes=(4, 6, 1))
    else:
        k.step("Let the stew stand for {min} and serve in bowls.",
               "Rest the stew off the heat for {min} before serving.", minutes=(5, 10, 5))


def chili(k: Kitchen) -> None:
    """Meat or beans with tomatoes and chili powder."""
    k.serves(4, 6, 8)
    k.add("1 tsp olive oil")
    k.group("meat", 0, 1, "1/4 lb ground beef", "1/4 lb ground turkey")
    k.add("1/4 onion, chopped|diced")
    k.group("pepper", 1, 1, "1/4 green bell pepper, chopped", "1/4 red bell pepper, chopped",
            "1/4 jalapeno pepper, minced")
    k.add("1/2 clove garlic, minced", "3/4 tsp chili powder", "1/4 tsp cumin")
    k.group("more", 0, 1, "1/4 tsp smoked paprika", "1/8 tsp oregano", "1/4 tsp cocoa powder")
    k.add("1/4 can diced tomatoes")
    n = 1 if k.has("meat") else 2
    k.group("bean", n, n, "1/4 can kidney beans, drained and rinsed",
            "1/4 can black beans, drained and rinsed", "1/4 can white beans, drained and rinsed")
    k.group("broth", 1, 1, "1/4 cup beef broth" if k.has("meat") else "1/4 cup vegetable broth",
            "1/4 cup water")
    k.group("top", 0, 1, "1 tbsp cheddar cheese", "1 tbsp sour cream", "1 tbsp cilantro, chopped",
            "1/2 green onion, sliced")
    salt_and_pepper(k)
    kind = "Beef" if k.has("ground beef") else "Turkey" if k.has("ground turkey") else "Vegetarian"
    k.title(f"{kind} Chili", f"{kind} {{bean:one}} Chili" if k.has("meat") else "{bean:one} Chili",
            f"{kind} Chili with {{pepper}}")
    k.tag("one-pot")
    pot = k.pick(*_POT)
    if k.has("meat"):
        k.step(f"Heat the {{olive oil}} in {pot} over medium-high heat. Brown the {{meat}}, "
               f"breaking it up, for {{min}}.",
               f"In {pot}, heat the {{olive oil}} and cook the {{meat}} until browned, {{min}}.",
               minutes=(6, 8, 1))
        k.step("Add the {onion, pepper} and cook until soft, {min}.",
               "Stir in the {onion, pepper} and cook for {min}.", minutes=(5, 7, 1))
    else:
        soften(k, pot, "olive oil", "onion", "pepper")
    bloom(k, "garlic", "chili powder", "cumin", "more")
    k.step("Add the {diced tomato, bean, broth}. Simmer, stirring now and then, for {min}.",
           "Stir in the {diced tomato, bean, broth}, cover, and simmer for {min}.",
           minutes=(25, 40, 5))
    season(k, "top")


def chickpea_curry(k: Kitchen) -> None:
    """Chickpeas or tofu in coconut or tomato sauce."""
    k.serves(2, 4, 6)
    k.add("1/2 tbsp vegetable oil", "1/4 onion, chopped|sliced", "1/2 clove garlic, minced",
          "1/2 tsp ginger, grated|minced")
    k.group("spice", 2, 3, "1/2 tsp curry powder", "1/4 tsp turmeric", "1/4 tsp cumin",
            "1/4 tsp garam masala", "1/4 tsp coriander")
    k.group("main", 1, 1, "1/2 can chickpeas, drained and rinsed", "1/4 lb tofu, cubed",
            "1 cup cauliflower, cut into florets", "1/2 eggplant, cubed")
    k.group("sauce", 1, 1, "1/4 can diced tomatoes", "1/2 can coconut milk")
    k.group("green", 0, 1, "1/2 cup spinach", "1/4 cup peas", "1/4 cup green beans, cut up")
    k.group("herb", 0, 1, "1 tbsp cilantro, chopped")
    salt_and_pepper(k)
    sauce = "Coconut" if k.has("coconut milk") else "Tomato"
    k.title("{main:one} Curry", f"{{main:one}} and {sauce} Curry",
            *(["{main:one} Curry with {green}", "{main:one} and {green:one} Curry"]
              if k.has("green") else [f"{sauce} {{main:one}} Curry"]))
    k.tag("curry")
    soften(k, k.pick("a deep skillet", "a large pan", "a wide pot"), "vegetable oil", "onion")
    bloom(k, "garlic", "ginger", "spice")
    k.step("Add the {main} and stir to coat in the spices, {min}.",
           "Stir in the {main} and cook for {min}.", minutes=(2, 4, 1))
    k.step("Pour in the {sauce}, cover, and simmer for {min}.",
           "Add the {sauce} and simmer until thick, about {min}.", minutes=(15, 20, 1))
    if k.has("green"):
        k.step("Stir in the {green} and cook for {min}.", "Add the {green} and simmer for {min}.",
               minutes=(3, 5, 1))
    season(k, "herb")


def chicken_curry(k: Kitchen) -> None:
    """Chicken, pork or shrimp with red curry paste and coconut milk."""
    k.serves(2, 4, 6)
    k.add("1/2 tbsp vegetable oil", "1/2 tbsp curry paste", "1/4 can coconut milk",
          "1/4 cup chicken broth")
    k.group("meat", 1, 1, "1/4 lb chicken thighs, cut into strips",
            "1/4 lb chicken breasts, cut into strips", "1/4 lb pork tenderloin, sliced",
            "1/4 lb shrimp")
    k.group("veg", 2, 3, "1/4 red bell pepper, sliced", "1/3 cup green beans, trimmed",
            "1/2 carrot, sliced", "1/3 cup snow peas", "1/4 zucchini, sliced",
            "1/3 cup broccoli, cut into florets")
    k.add("1/2 tbsp lime juice", "1/2 tsp brown sugar")
    k.group("salty", 1, 1, "1 tsp soy sauce", "1/8 tsp salt")
    k.group("herb", 1, 1, "1 tbsp basil, torn", "1 tbsp cilantro, chopped")
    meat = ("Chicken" if k.has("chicken thigh", "chicken breast")
            else "Pork" if k.has("pork tenderloin") else "Shrimp")
    k.title(f"{meat} Coconut Curry", f"Red {meat} Curry", f"{meat} Curry with {{veg}}",
            f"Coconut {meat} Curry with {{herb}}")
    k.tag("curry")
    k.step("Heat the {vegetable oil} in a large pan over medium heat, add the {curry paste}, and "
           "fry for {min}.",
           "In a deep skillet, fry the {curry paste} in the {vegetable oil} for {min}.",
           minutes=(1, 2, 1))
    k.step("Stir in the {coconut milk, chicken broth} and bring to a simmer.",
           "Whisk in the {coconut milk, chicken broth} and simmer for a moment.")
    if k.has("shrimp"):
        k.step("Add the {veg} and simmer for {min}, until almost tender.", minutes=(4, 6, 1))
        k.step("Add the {meat} and cook until pink, {min}.", minutes=(3, 4, 1))
    else:
        k.step("Add the {meat} and simmer for {min}.",
               "Add the {meat} and cook gently for {min}.", minutes=(8, 10, 1))
        k.step("Add the {veg} and cook until just tender, {min}.",
               "Stir in the {veg} and simmer for {min} more.", minutes=(4, 6, 1))
    k.step("Stir in the {lime juice, brown sugar, salty}, and serve with the {herb} on top.",
           "Season with the {lime juice, brown sugar, salty}. Top with the {herb} and serve.")


def dal(k: Kitchen) -> None:
    """Red lentils with fried spices."""
    k.serves(2, 4, 6)
    k.add("1/3 cup red lentils, rinsed", "1 cup water", "1/4 tsp turmeric", "1/4 tsp salt")
    k.group("veg", 0, 1, "1/2 cup spinach", "1/2 tomato, chopped", "1/2 cup cauliflower, chopped",
            "1/2 carrot, diced")
    k.group("fat", 1, 1, "1/2 tbsp butter", "1/2 tbsp vegetable oil")
    k.add("1/4 onion, sliced|chopped", "1/2 clove garlic, sliced|minced")
    k.group("spice", 1, 3, "1/4 tsp cumin", "1/4 tsp coriander", "1/4 tsp garam masala",
            "1/8 tsp red pepper flakes", "1/2 tsp ginger, grated")
    k.group("end", 1, 1, "1/2 tbsp lemon juice", "1 tbsp cilantro, chopped", "1/2 tbsp lime juice")
    k.title("Red Lentil Dal", "Red Lentil Dal with {end}", "Simple Red Lentil Dal",
            *(["{veg:one} Dal", "Red Lentil and {veg:one} Dal"] if k.has("veg") else []))
    k.tag("curry")
    k.step("Put the {red lentil, water, turmeric, salt} in a pot and bring to a boil.",
           "Bring the {red lentil, water, turmeric, salt} to a boil in a saucepan.")
    k.step("Simmer, stirring now and then, until the lentils fall apart, about {min}.",
           "Reduce the heat and simmer for {min}, until the lentils are soft.",
           minutes=(18, 25, 1))
    if k.has("veg"):
        k.step("Stir in the {veg} and cook for {min}.", "Add the {veg} and simmer for {min}.",
               minutes=(5, 8, 1))
    k.step("Meanwhile, heat the {fat} in a small skillet and cook the {onion} until golden, {min}.",
           "In a skillet, fry the {onion} in the {fat} until golden, about {min}.",
           minutes=(6, 9, 1))
    k.step("Add the {garlic, spice} and fry for 1 minute.",
           "Stir in the {garlic, spice} and cook for 1 minute, until fragrant.")
    k.step("Pour the hot spices over the lentils, stir in the {end}, and serve.",
           "Stir the spiced {onion} and the {end} into the lentils and serve.")


def braised_chicken(k: Kitchen) -> None:
    """Chicken thighs browned, then simmered in a small sauce."""
    k.serves(2, 4, 6)
    k.add("2 chicken thighs")
    salt_and_pepper(k)
    k.add("1/2 tbsp olive oil", "1/4 onion, sliced|chopped", "1 clove garlic, sliced|minced")
    k.group("liquid", 1, 1, "1/3 cup chicken broth", "1/4 cup white wine")
    k.group("body", 1, 1, "1/4 can diced tomatoes", "1/2 cup mushrooms, sliced",
            "1/2 red bell pepper, sliced", "1 leek, sliced", "1 carrot, sliced")
    k.group("sharp", 1, 1, "1 tbsp olives", "1 tsp Dijon mustard", "1/2 tbsp lemon juice",
            "1/2 tbsp balsamic vinegar")
    k.group("herb", 1, 1, "1/4 tsp thyme", "1/4 tsp oregano", "1/4 tsp rosemary", "1/4 tsp paprika")
    k.title("Braised Chicken with {body}", "Chicken with {body, sharp}",
            "Skillet Chicken with {body, herb}", "Braised Chicken with {sharp}")
    k.tag("main")
    k.step("Season the {chicken thigh} with the {salt, black pepper}.",
           "Pat the {chicken thigh} dry and rub with the {salt, black pepper}.")
    k.step("Heat the {olive oil} in a large skillet over medium-high heat and brown the chicken on "
           "both sides, {min}. Set aside.",
           "Brown the chicken in the {olive oil} in a wide pan for {min}, then lift it out.",
           minutes=(8, 10, 1))
    k.step("Cook the {onion, garlic, body} in the same pan for {min}.",
           "Add the {onion, garlic, body} to the pan and cook until soft, {min}.",
           minutes=(5, 7, 1))
    k.step("Stir in the {liquid, sharp, herb} and scrape up the brown bits.",
           "Add the {liquid, sharp, herb}, and bring to a simmer.")
    k.step("Return the chicken, cover, and simmer until cooked through, about {min}.",
           "Nestle the chicken in the sauce, cover, and simmer for {min}.", minutes=(20, 30, 5))


FAMILIES: tuple[Family, ...] = (
    beef_stew,
    chili,
    chickpea_curry,
    chicken_curry,
    dal,
    braised_chicken,
)

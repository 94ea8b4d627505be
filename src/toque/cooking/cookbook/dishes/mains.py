"""Main dishes of meat, fish or tofu."""

# Prose packed by hand: one argument a line would triple these files.
# fmt: off

from __future__ import annotations

from toque.cooking.cookbook.dishes.techniques import preheat, salt_and_pepper
from toque.cooking.cookbook.recipe_builder import Family, Kitchen


def stir_fry(k: Kitchen) -> None:
    """Meat or tofu and vegetables over high heat."""
    k.serves(2, 4)
    k.add("1 tbsp soy sauce")
    k.group("sauce", 1, 2, "1/2 tbsp rice vinegar", "1/2 tbsp honey", "1/4 tsp sesame oil",
            "1/2 tbsp lime juice", "1 tbsp orange juice")
    k.add("1/2 tsp cornstarch", "1/2 tbsp vegetable oil")
    k.group("main", 1, 1, "1/3 lb beef sirloin, thinly sliced",
            "1/3 lb chicken breasts, cut into strips", "1/3 lb pork tenderloin, cut into strips",
            "1/3 lb shrimp", "1/3 lb tofu, cubed")
    k.group("veg", 2, 3, "1 cup broccoli, cut into florets", "1/2 red bell pepper, sliced",
            "1/2 carrot, thinly sliced", "1/2 cup snow peas", "1/2 cup mushrooms, sliced",
            "1/2 cup green beans, trimmed", "1/2 cup asparagus, cut up")
    k.add("1/2 clove garlic, minced|sliced")
    k.group("root", 0, 1, "1 tsp ginger, grated|minced")
    k.group("top", 0, 1, "1 green onion, sliced", "1/2 tbsp sesame seeds",
            "1 tbsp peanuts, chopped")
    k.title("{main:one} and {veg:one} Stir-Fry" if k.count("veg") == 2 else "{main:one} Stir-Fry",
            "{main:one} Stir-Fry with {veg}", "{main:one} Stir-Fry with {sauce}")
    k.tag("main", "stir-fry")
    k.step("Whisk the {soy sauce, sauce, cornstarch} in a small bowl.",
           "In a small bowl, stir together the {soy sauce, sauce, cornstarch}.",
           "Mix the {soy sauce, sauce, cornstarch} and set aside.")
    pan = k.pick("a wok", "a large skillet")
    k.step(f"Heat half of the {{vegetable oil}} in {pan} over high heat. Stir-fry the {{main}} "
           f"for {{min}} and set aside.",
           f"In {pan}, cook the {{main}} in half of the {{vegetable oil}} over high heat for "
           f"{{min}}. Remove to a plate.",
           minutes=(3, 4, 1) if k.has("beef sirloin", "shrimp") else (5, 6, 1))
    k.step("Add the rest of the oil and stir-fry the {veg} until crisp-tender, {min}.",
           "Stir-fry the {veg} in the remaining oil for {min}.", minutes=(4, 6, 1))
    k.step("Add the {garlic, root} and stir for 30 seconds.",
           "Stir in the {garlic, root} and cook until fragrant.")
    k.step("Return the {main} to the pan, pour in the sauce, and cook until thick, {min}.",
           "Add the sauce and the {main} and toss for {min}, until glossy.", minutes=(1, 2, 1))
    k.step("Sprinkle with the {top} and serve." if k.has("top") else "Serve hot.")


def sheet_pan_dinner(k: Kitchen) -> None:
    """Meat and vegetables roasted on one pan."""
    k.serves(2, 4)
    k.group("main", 1, 1, "1/2 lb chicken thighs", "1/3 lb Italian sausage, sliced",
            "1 pork chop", "1/2 lb chicken breasts, cut into strips")
    k.group("veg", 2, 3, "1 potato, cut into wedges", "1/2 red onion, cut into wedges",
            "1 cup broccoli, cut into florets", "1 carrot, cut into sticks",
            "1/2 red bell pepper, cut into chunks", "1 cup cauliflower, cut into florets",
            "1/2 sweet potato, cubed", "1/2 zucchini, cut into chunks")
    k.add("1 tbsp olive oil")
    k.group("acid", 1, 1, "1/2 tbsp lemon juice", "1/2 tbsp balsamic vinegar",
            "1/2 tbsp Dijon mustard", "1/2 tbsp honey")
    k.add("1/2 clove garlic, minced")
    k.group("spice", 1, 1, "1/2 tsp oregano", "1/2 tsp smoked paprika", "1/4 tsp rosemary",
            "1/4 tsp thyme", "1/2 tsp cumin")
    salt_and_pepper(k, "1/4")
    k.title("Sheet Pan {main} with {veg}", "Sheet Pan {main} and {veg}",
            "Roasted {main} with {veg}", "{spice:one} {main} with {veg}")
    k.tag("main", "one-pan")
    preheat(k, 400, 425, "line a large baking sheet with parchment paper")
    k.step("Stir the {olive oil, acid, garlic, spice, salt, black pepper} in a large bowl.",
           "In a large bowl, mix the {olive oil, acid, garlic, spice, salt, black pepper}.")
    k.step("Add the {main, veg} and toss to coat, then spread in one layer on the sheet.",
           "Toss the {main, veg} in the bowl and arrange on the baking sheet.")
    k.step("Roast, turning once, until browned and cooked through, about {min}.",
           "Roast for {min}, stirring halfway, until the {main} {main:is} done and the "
           "vegetables are tender.", minutes=(25, 35, 5))


def roast_chicken(k: Kitchen) -> None:
    """A whole bird, or bone-in pieces, with herbs."""
    k.serves(4)
    k.add("1/4 chicken")
    k.group("fat", 1, 1, "3/4 tbsp butter, softened", "3/4 tbsp olive oil")
    k.group("herb", 1, 2, "1/4 tsp thyme", "1/4 tsp rosemary", "1/4 tsp paprika",
            "1/4 tsp oregano")
    k.group("flavor", 1, 2, "1 clove garlic, minced|crushed", "1/2 tsp lemon zest",
            "1/2 tsp Dijon mustard", "1/2 tbsp honey")
    salt_and_pepper(k, "1/4")
    k.group("bed", 1, 2, "1/2 onion, quartered", "1 carrot, cut into chunks",
            "3/2 potato, halved", "1 stalk celery, cut into chunks",
            "1 leek, cut into chunks")
    k.add("2 tbsp chicken broth" if k.chance(50) else "2 tbsp white wine")
    k.call("liquid", "chicken broth", "white wine")
    k.title("Roast Chicken with {herb}", "{herb:one} Roast Chicken", "Roast Chicken with {bed}",
            "Sunday Roast Chicken with {bed}")
    k.tag("main", "roast")
    preheat(k, 400, 425, "set out a roasting pan")
    k.step("Mix the {fat, herb, flavor, salt, black pepper} in a small bowl.",
           "Stir together the {fat, herb, flavor, salt, black pepper}.")
    k.step("Pat the {chicken} dry and rub it all over with the mixture.",
           "Dry the {chicken} well and spread the mixture over the skin.")
    k.step("Scatter the {bed} in the pan, pour in the {liquid}, and set the {chicken} on top.",
           "Put the {bed, liquid} in the pan and place the {chicken} on top, breast up.")
    k.step("Roast until the juices run clear, about {min}.",
           "Roast for {min}, until a thermometer in the thigh reads 165 degrees F.",
           minutes=(70, 85, 5))
    k.step("Rest for {min} before carving, and serve with the {bed}.",
           "Let stand for {min}, carve, and serve with the {bed}.", minutes=(10, 15, 5))


def baked_fish(k: Kitchen) -> None:
    """Fish fillets baked under a topping or on vegetables."""
    k.serves(2, 4)
    k.group("fish", 1, 1, "1 salmon fillet", "1 cod fillet")
    k.group("bed", 0, 1, "1/2 cup cherry tomatoes, halved", "1/2 cup asparagus, trimmed",
            "1/2 zucchini, sliced", "1/2 cup green beans, trimmed", "1 cup spinach")
    k.group("fat", 1, 1, "1/2 tbsp olive oil", "1/2 tbsp butter, melted")
    k.group("flavor", 1, 2, "1/2 tbsp lemon juice", "1 tsp Dijon mustard",
            "1/2 clove garlic, minced",
            "1 tsp honey", "1/2 tsp lemon zest")
    k.group("herb", 1, 1, "1/2 tbsp dill, chopped", "1/2 tbsp parsley, chopped", "1/4 tsp paprika",
            "1/8 tsp thyme", "1/2 tbsp chives, chopped")
    k.group("crust", 0, 1, "1 tbsp bread crumbs", "1 tbsp Parmesan cheese",
            "1 tbsp almonds, finely chopped")
    salt_and_pepper(k)
    k.title("Baked {fish} with {flavor}", "{herb:one} {fish}",
            *(["Baked {fish} with {bed}"] * 2 if k.has("bed") else ["Baked {fish} with {herb}"]),
            *(["{crust:one} Crusted {fish}"] if k.has("crust") else []))
    k.tag("main", "fish")
    preheat(k, 400, 425, "grease a baking dish")
    if k.has("bed"):
        k.step("Spread the {bed} in the dish and lay the {fish} on top.",
               "Arrange the {bed} in the dish and place the {fish} over them."
               if not k.has("spinach", "asparagus", "zucchini") else
               "Put the {bed} in the dish and set the {fish} on top.")
    else:
        k.step("Pat the {fish} dry and place in the dish.", "Lay the {fish} in the dish.")
    k.step("Mix the {fat, flavor, herb, salt, black pepper} and brush over the fish.",
           "Stir the {fat, flavor, herb, salt, black pepper} together and spoon over the fish.")
    if k.has("crust"):
        k.step("Press the {crust} onto the fish.", "Sprinkle the fish with the {crust}.")
    k.step("Bake until the fish flakes easily with a fork, about {min}.",
           "Bake for {min}, until the fish is opaque and flakes.", minutes=(12, 16, 1))


def meatballs(k: Kitchen) -> None:
    """Meatballs browned, then simmered in sauce."""
    k.serves(4, 6)
    k.group("meat", 1, 1, "1/4 lb ground beef", "1/4 lb ground turkey")
    k.add("2 tbsp bread crumbs", "1/4 egg", "1/2 clove garlic, minced")
    k.group("herb", 1, 1, "1/2 tbsp parsley, chopped", "1/4 tsp oregano", "1/2 tbsp mint, chopped",
            "1/4 tsp cumin")
    k.group("cheese", 0, 1, "1 tbsp Parmesan cheese", "1 tbsp feta cheese")
    salt_and_pepper(k)
    k.add("1/2 tbsp olive oil", "1/4 onion, chopped")
    k.group("sauce", 1, 1, "1/4 can crushed tomatoes", "1/2 cup beef broth")
    k.group("body", 1, 1, "1/2 tbsp tomato paste", "1 tbsp cream", "1/4 cup mushrooms, sliced",
            "1/4 red bell pepper, diced")
    meat = "Turkey" if k.has("ground turkey") else "Beef"
    sauce = "Tomato Sauce" if k.has("crushed tomato") else "Gravy"
    k.title(f"{meat} Meatballs in {sauce}", f"{meat} Meatballs with {{body}}",
            f"{{herb:one}} {meat} Meatballs in {sauce}")
    k.tag("main")
    k.step("Mix the {meat, bread crumb, egg, garlic, herb, cheese, salt, black pepper} by hand.",
           "In a bowl, combine the {meat, bread crumb, egg, garlic, herb, cheese, salt, black "
           "pepper}.")
    size = k.pick("1-inch", "1 1/2-inch", "golf ball size")
    k.step(f"Roll the mixture into {size} balls.", f"Shape into {size} meatballs.")
    k.step("Brown the meatballs in the {olive oil} in a large skillet, about {min}, and set aside.",
           "Heat the {olive oil} in a wide pan and brown the meatballs for {min}. Remove.",
           minutes=(6, 8, 1))
    k.step("Cook the {onion} in the same pan for {min}.",
           "Add the {onion} to the pan and cook until soft, {min}.", minutes=(4, 5, 1))
    k.step("Stir in the {sauce, body} and bring to a simmer.",
           "Add the {sauce, body} and simmer for a moment.")
    k.step("Return the meatballs and simmer until cooked through, {min}.",
           "Add the meatballs, cover, and simmer for {min}.", minutes=(12, 18, 1))


def meatloaf(k: Kitchen) -> None:
    """Ground meat baked in a loaf under a glaze."""
    k.serves(6, 8)
    k.group("meat", 1, 1, "1/4 lb ground beef", "1/4 lb ground turkey")
    k.add("1/8 onion, finely chopped|grated", "1/4 clove garlic, minced")
    k.group("crumb", 1, 1, "2 tbsp bread crumbs", "2 tbsp oats")
    k.add("1/6 egg", "1 tbsp milk")
    k.group("veg", 0, 1, "1/4 carrot, grated", "2 tbsp mushrooms, chopped",
            "1/4 green bell pepper, chopped")
    k.group("herb", 1, 1, "1/8 tsp thyme", "1/8 tsp oregano", "1/8 tsp smoked paprika",
            "1/2 tbsp parsley, chopped")
    salt_and_pepper(k, "1/6")
    k.add("1 tbsp ketchup")
    k.group("glaze", 1, 1, "1 tsp brown sugar", "1/2 tsp Dijon mustard", "1/2 tsp balsamic vinegar",
            "1 tsp honey")
    meat = "Turkey" if k.has("ground turkey") else "Beef"
    k.title(f"{meat} Meatloaf", f"{meat} Meatloaf with {{glaze}}", f"{{herb:one}} {meat} Meatloaf",
            *([f"{meat} Meatloaf with {{veg}}"] if k.has("veg") else []))
    k.tag("main", "baked")
    preheat(k, 350, 375, "line a loaf pan with parchment paper")
    k.step("Combine the {crumb, milk, egg} in a large bowl and let stand for {min}.",
           "In a large bowl, soak the {crumb} in the {milk, egg} for {min}.", minutes=5)
    k.step("Add the {meat, onion, garlic, veg, herb, salt, black pepper} and mix gently.",
           "Mix in the {meat, onion, garlic, veg, herb, salt, black pepper} by hand.")
    k.step("Press into the pan and smooth the top.", "Pack the mixture into the loaf pan.")
    k.step("Stir the {ketchup, glaze} together and spread over the loaf.",
           "Mix the {ketchup, glaze} and brush on top.")
    k.step("Bake until cooked through, about {min}.",
           "Bake for {min}, until a thermometer reads 165 degrees F.", minutes=(50, 60, 5))
    k.step("Rest for 10 minutes before slicing.", "Cool for 10 minutes, then slice and serve.",
           minutes=10)


def seared_chops(k: Kitchen) -> None:
    """Chops or breasts seared, with a pan sauce."""
    k.serves(2, 4)
    k.group("meat", 1, 1, "1 pork chop", "1 chicken breast")
    salt_and_pepper(k)
    k.group("rub", 0, 1, "1/4 tsp paprika", "1/8 tsp cumin", "1/4 tsp garam masala")
    k.add("1/2 tbsp olive oil")
    k.group("base", 1, 1, "1/2 shallot, minced", "1/2 cup mushrooms, sliced", "1/2 apple, sliced",
            "1/4 onion, sliced", "1/2 leek, sliced")
    k.group("liquid", 1, 1, "1/4 cup chicken broth", "3 tbsp white wine")
    k.group("finish", 1, 1, "1 tsp Dijon mustard", "1 tbsp cream", "1/2 tbsp butter",
            "1 tsp honey", "1 tsp balsamic vinegar")
    k.group("herb", 1, 1, "1/8 tsp thyme", "1/8 tsp rosemary", "1/2 tbsp parsley, chopped")
    k.title("{meat} with {base}", "Pan-Seared {meat} with {base, finish}",
            "Skillet {meat} with {finish, herb}", "{meat} with {base, herb}")
    k.tag("main")
    k.step("Season the {meat} with the {salt, black pepper, rub}.",
           "Rub the {meat} with the {salt, black pepper, rub}.")
    k.step("Heat the {olive oil} in a heavy skillet over medium-high heat and cook the {meat} for "
           "{min} per side. Set aside.",
           "Sear the {meat} in the {olive oil} in a hot skillet, {min} per side, and keep warm.",
           minutes=(5, 6, 1))
    k.step("Cook the {base} in the same pan until golden, {min}.",
           "Add the {base} to the pan and cook for {min}.", minutes=(4, 6, 1))
    k.step("Pour in the {liquid}, scrape the pan, and boil for {min}.",
           "Add the {liquid} and simmer until reduced by half, {min}.", minutes=(2, 3, 1))
    k.step("Stir in the {finish, herb} and spoon over the {meat}.",
           "Finish with the {finish, herb} and pour the sauce over the {meat}.")


FAMILIES: tuple[Family, ...] = (
    stir_fry,
    sheet_pan_dinner,
    roast_chicken,
    baked_fish,
    meatballs,
    meatloaf,
    seared_chops,
)

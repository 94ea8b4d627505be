"""The cookbook's pantry: foods, their names, and rough figures per 100 g.

The figures are rounded common knowledge (energy, fat, sugar, sodium of raw foods, weights of a
cup and of one piece): enough for a traffic light, not for a diet.
"""

from __future__ import annotations

from dataclasses import dataclass

GRAMS_PER_POUND = 453.6
TEASPOONS_PER_CUP = 48.0


@dataclass(frozen=True)
class Food:
    """One food of the pantry."""

    name: str
    """Its name in a step, singular: "chickpea"."""
    plural: str
    """Its name in a step, plural: "chickpeas"; of a mass noun, the same as `name`."""
    qualifier: str
    """Words before the name in an ingredient list: "boneless skinless" of chicken breasts."""
    per_100_g: dict[str, float]
    """energy_kcal, fat_g, sugar_g and salt_g."""
    cup_g: float
    """Grams in a cup; 0 when never measured by volume."""
    piece_g: float
    """Grams of one piece, clove, slice, stalk or can; 0 when never counted."""
    origin: str
    """plant, dairy, egg, honey, meat or fish."""


# name/plural | qualifier | kcal fat sugar sodium per 100 g | grams a cup | grams a piece
_PLANTS = """
onion/s|yellow|40 0.1 4.2 4|160|150
red onion/s||40 0.1 4.2 4|160|150
green onion/s||32 0.2 2.3 16|100|15
shallot/s||72 0.1 7.9 12|160|40
leek/s||61 0.3 3.9 20|90|120
garlic||149 0.5 1 17|136|3
ginger|fresh|80 0.8 1.7 13|96|0
carrot/s||41 0.2 4.7 69|128|70
celery||16 0.2 1.3 80|100|40
potato/es||77 0.1 0.8 6|150|180
sweet potato/es||86 0.1 4.2 55|133|200
beet/s||43 0.2 6.8 78|136|100
butternut squash||45 0.1 2.2 4|140|0
zucchini||17 0.3 2.5 8|124|200
eggplant/s||25 0.2 3.5 2|82|450
red bell pepper/s||31 0.3 4.2 4|149|150
green bell pepper/s||20 0.2 2.4 3|149|150
jalapeno pepper/s||29 0.4 4.1 3|90|14
tomato/es||18 0.2 2.6 5|180|120
cherry tomato/es||18 0.2 2.6 5|149|0
cucumber/s||15 0.1 1.7 2|104|250
broccoli||34 0.4 1.7 33|91|0
cauliflower||25 0.3 1.9 30|107|600
green bean/s||31 0.2 3.3 6|110|0
asparagus||20 0.1 1.9 2|134|0
spinach|fresh|23 0.4 0.4 79|30|0
kale||35 1.5 0.8 53|67|0
cabbage|green|25 0.1 3.2 18|89|0
romaine lettuce||17 0.3 1.2 8|47|0
arugula||25 0.7 2 27|20|0
mushroom/s||22 0.3 2 5|70|0
corn|frozen|86 1.4 3.2 15|145|0
pea/s|frozen|81 0.4 5.7 5|145|0
snow pea/s||42 0.2 4 4|98|0
avocado/s|ripe|160 14.7 0.7 7|150|150
pumpkin puree||34 0.3 3.3 5|245|425
apple/s||52 0.2 10.4 1|125|180
pear/s|ripe|57 0.1 9.8 1|140|180
banana/s|ripe|89 0.3 12.2 1|150|118
blueberry/blueberries||57 0.3 10 1|148|0
raspberry/raspberries||52 0.7 4.4 1|123|0
strawberry/strawberries||32 0.3 4.9 1|152|0
cherry/cherries|pitted|63 0.2 12.8 0|154|0
peach/es|ripe|39 0.3 8.4 0|154|150
mango/es|ripe|60 0.4 13.7 1|165|200
pineapple||50 0.1 9.9 1|165|0
raisin/s||299 0.5 59 11|145|0
cranberry/cranberries|dried|308 1.4 65 3|120|0
date/s|pitted|282 0.4 63 2|147|0
lemon juice||22 0.2 2.5 1|244|0
lemon zest||47 0.3 4.2 6|96|0
lime juice||25 0.1 1.7 2|244|0
orange juice||45 0.2 8.4 1|248|0
rice|long-grain white|365 0.7 0.1 5|185|0
brown rice||370 2.9 0.9 7|190|0
rice|cooked|130 0.3 0.1 1|158|0|cooked rice
arborio rice||365 0.6 0.1 5|200|0
quinoa||368 6 0 5|170|0
couscous||376 0.6 0 10|173|0
bulgur||342 1.3 0.4 17|140|0
pearl barley||352 1.2 0.8 9|200|0
oat/s|rolled|379 6.5 1 6|90|0
spaghetti||371 1.5 2.7 6|0|0
penne||371 1.5 2.7 6|0|0
fettuccine||371 1.5 2.7 6|0|0
rigatoni||371 1.5 2.7 6|0|0
macaroni||371 1.5 2.7 6|105|0
lasagna noodle/s||371 1.5 2.7 6|0|28
rice noodle/s||364 0.6 0.1 182|0|0
egg noodle/s||384 4.4 1.9 21|38|0
bread crumb/s|dry|395 5.3 6.2 732|108|0
bread||265 3.2 5 491|0|30
flour tortilla/s||312 8 3 700|0|45
corn tortilla/s||218 2.9 0.9 45|0|26
burger bun/s||279 4.5 6 480|0|50
pizza dough||260 4 3 450|0|0
flour|all-purpose|364 1 0.3 2|125|0
whole wheat flour||340 2.5 0.4 2|120|0
cornmeal|yellow|370 3.6 0.6 7|140|0
cornstarch||381 0.1 0 9|128|0
pie crust/s|prepared|480 28 6 420|0|180
tofu|extra-firm|100 5.5 0.6 8|0|0
black bean/s||91 0.3 0.3 300|172|255
chickpea/s||130 2.6 3 280|164|255
kidney bean/s||100 0.5 2 290|177|255
white bean/s||105 0.4 0.3 280|179|255
lentil/s|brown|352 1.1 2 6|192|0
red lentil/s||352 2.2 2 6|192|0
olive oil||884 100 0 2|216|0
vegetable oil||884 100 0 0|218|0
sesame oil||884 100 0 0|218|0
soy sauce||53 0.6 0.4 5493|255|0
red wine vinegar||19 0 0 8|240|0
balsamic vinegar||88 0 15 23|255|0
rice vinegar||18 0 0 2|240|0
apple cider vinegar||21 0 0.4 5|240|0
white wine|dry|82 0 1 5|236|0
Dijon mustard||66 4 1 1100|250|0
maple syrup||260 0 60 12|315|0
ketchup||101 0.1 21 907|240|0
tomato paste||82 0.5 12 59|262|0
diced tomato/es||17 0.1 2.4 115|245|411
crushed tomato/es||32 0.3 4.4 132|245|794
salsa||29 0.2 4 430|250|0
peanut butter||588 50 9 17|258|0
tahini||595 54 0.5 115|240|0
curry paste|red|150 8 5 2500|240|0
coconut milk||197 21 2.8 13|226|400
vegetable broth|low-sodium|6 0.1 0.6 60|240|0
olive/s|pitted black|145 14 0 735|135|0
water||0 0 0 0|237|0
sugar|granulated|387 0 100 1|200|0
brown sugar||380 0 97 28|200|0
powdered sugar||389 0 98 2|120|0
baking powder||53 0 0 10600|221|0
baking soda||0 0 0 27360|221|0
yeast|active dry|325 7 0 51|150|0
cocoa powder|unsweetened|228 14 2 21|86|0
chocolate chip/s||480 30 55 11|170|0
vanilla extract||288 0 13 9|208|0
walnut/s||654 65 2.6 2|117|0
almond/s||579 50 4.4 1|140|0
pecan/s||691 72 4 0|99|0
peanut/s|roasted|567 49 4.7 18|146|0
pumpkin seed/s||559 49 1.4 7|129|0
sesame seed/s||573 50 0.3 11|144|0
chia seed/s||486 31 0 16|170|0
coconut|shredded|660 64 7 37|85|0
salt||0 0 0 38758|288|0
black pepper|ground|251 3.3 0.6 20|110|0
cumin|ground|375 22 2 168|96|0
coriander|ground|298 18 0 35|80|0
paprika||282 13 10 68|109|0
smoked paprika||282 13 10 68|109|0
chili powder||282 14 7 1640|120|0
curry powder||325 14 3 52|100|0
garam masala||379 15 2 97|100|0
turmeric|ground|312 3 3 27|140|0
cinnamon|ground|247 1.2 2 10|125|0
nutmeg|ground|525 36 3 16|112|0
red pepper flake/s||318 17 10 30|86|0
oregano|dried|265 4.3 4 25|48|0
thyme|dried|276 7.4 2 55|48|0
rosemary|dried|331 15 0 50|58|0
parsley|fresh|36 0.8 0.9 56|60|0
cilantro|fresh|23 0.5 0.9 46|16|0
basil|fresh|23 0.6 0.3 4|24|0
dill|fresh|43 1.1 0 61|9|0
mint|fresh|44 0.7 0 30|25|0
chive/s|fresh|30 0.7 1.9 3|48|0
"""
_ANIMAL_FOODS = {
    "meat": """
chicken breast/s|boneless skinless|120 2.6 0 45|140|200
chicken thigh/s|boneless skinless|144 8 0 95|0|110
chicken/s|whole|215 15 0 70|0|1200
ground beef||215 15 0 66|0|0
stewing beef||190 11 0 65|0|0
beef sirloin||190 10 0 55|0|0
pork chop/s|boneless|200 11 0 55|0|150
pork tenderloin||120 3.5 0 50|0|0
ground turkey||150 8 0 70|0|0
Italian sausage||300 26 1 730|0|0
bacon||417 40 0 660|0|20
ham||120 4 1 1100|135|0
chicken broth|low-sodium|6 0.2 0.5 60|240|0
beef broth|low-sodium|7 0.2 0.5 60|240|0
""",
    "fish": """
shrimp|peeled|85 0.5 0 250|0|0
salmon fillet/s||200 13 0 59|0|170
cod fillet/s||82 0.7 0 54|0|170
tuna||116 0.8 0 340|0|110
""",
    "egg": """
egg/s|large|143 9.5 0.4 142|0|50
mayonnaise||680 75 0.6 635|220|0
""",
    "honey": """
honey||304 0 82 4|339|0
""",
    "dairy": """
butter||717 81 0.1 300|227|0
milk||61 3.3 5 43|244|0
cream|heavy|340 36 2.9 27|238|0
sour cream||198 19 3.5 31|230|0
yogurt|plain|61 3.3 4.7 46|245|0
Greek yogurt||73 2 3.6 35|245|0
buttermilk||40 0.9 4.8 190|245|0
cream cheese||342 34 3 321|232|0
cheddar cheese|shredded|403 33 0.5 620|113|0
mozzarella cheese|shredded|300 22 1 627|112|0
Parmesan cheese|grated|431 29 0.9 1500|100|0
feta cheese|crumbled|264 21 4 917|150|0
goat cheese||264 21 0.5 360|0|0
ricotta cheese||174 13 0.3 84|246|0
Swiss cheese|shredded|393 31 0 187|108|0
pesto||460 45 2 700|240|0
""",
}


def _food(line: str, origin: str) -> tuple[str, Food]:
    names, qualifier, figures, cup_g, piece_g, *key = line.split("|")
    name, _, ending = names.partition("/")
    plural = ending if len(ending) > 2 else name + ending
    energy, fat, sugar, sodium_mg = map(float, figures.split())
    salt = sodium_mg * 2.5 / 1000.0  # grams of salt per milligram of sodium
    facts = {"energy_kcal": energy, "fat_g": fat, "sugar_g": sugar, "salt_g": salt}
    food = Food(name, plural, qualifier, facts, float(cup_g), float(piece_g), origin)
    return key[0] if key else name, food


def _pantry() -> dict[str, Food]:
    sections = {"plant": _PLANTS, **_ANIMAL_FOODS}
    foods = dict(
        _food(line, origin)
        for origin, section in sections.items()
        for line in section.strip().splitlines()
    )
    return foods | {food.plural: food for key, food in foods.items() if key == food.name}


PANTRY: dict[str, Food] = _pantry()
"""Every food by its singular and its plural name."""

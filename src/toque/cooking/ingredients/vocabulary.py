"""Vocabulary of ingredient lines: units of measure, their spellings, sizes, preparations, remarks.

A unit that exists in two sizes has the United States customary size, as in most English recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnitKind = Literal["mass", "volume", "length", "count"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measure with its canonical name."""

    name: str
    kind: UnitKind
    size: float  # grams of a mass, millilitres of a volume, centimetres of a length; 0 for pieces


# name | kind | size | other spellings. Words of three letters or more also get plurals in "s".
_TABLE = """
gram|mass|1|g gm gr grm gms gramme gramm gramo grama grammi г 克
decagram|mass|10|dkg
kilogram|mass|1000|kg kgs kilo quilo кг
milligram|mass|0.001|mg
ounce|mass|28.35|oz ozs onz
pound|mass|453.6|lb lbs pd
millilitre|volume|1|ml mls milliliter cc mililitro мл 毫升
centilitre|volume|10|cl centiliter
decilitre|volume|100|dl deciliter decilitro
litre|volume|1000|l liter ltr lt litro litri
teaspoon|volume|4.93|tsp tsps t ts teasp teaspoonful teaspon tl teel tsk cucharadita cucchiaino \
cucchiaini łyżeczka łyżeczki teelöffel theelepel lžička lžičky lyžička kl čl càc 茶匙
tablespoon|volume|14.79|tbsp tbsps tbs tb tbl tblsp tbls T el msk spsk ss ek pl cs càs cucharada \
colher colheres esslöffel eetlepel cucchiaio cucchiai łyżka łyżki łyżek lžíce lyžice lyžica 汤匙
dessertspoon|volume|10|dsp dstspn
cup|volume|236.6|c cupful taza tasse xícara φλ szklanka szklanki kopje 杯
fluid ounce|volume|29.57|floz
pint|volume|473.2|pt pts
quart|volume|946.4|qt qts
gallon|volume|3785|gal gals
inch|length|2.54|in ins inches
centimetre|length|1|cm cms centimeter
millimetre|length|0.1|mm millimeter
clove|count|0|clv dente diente gousse spicchio spicchi zehe zehen teentje teen tenen fedd båt \
ząbek ząbki gerezd fed klyfta strúčik strúčikov stroužek stroužky
can|count|0|tin lata blik blikje boks bokser dose dosen dåse burk
pouch|count|0|pouches
package|count|0|pk pkg pkgs pack packet packages pkt pck päckchen paket bal förpackning
sachet|count|0|envelope zakje bustina sachê sáček sobre
box|count|0|boxes case
container|count|0|tub pot tube
pinch|count|0|pinches pizca pincée prise prisen snufje snuifje snuf msp krm nip \
csipet nypa pitada pizzico szczypta szczypty špetka štipka щепотка
dash|count|0|dashes dsh
splash|count|0|splashes scheut scheutje spritzer schuss
glug|count|0|lug
knob|count|0|nub klont klontje
handful|count|0|handsful handfull handje handvol handvoll poignée
slice|count|0|rasher φετ rodaja tranche scheibe scheiben plak plakje plakken skiva skivor fetta
bunch|count|0|bunches bosje bund bd bunt manojo knippe botte
stalk|count|0|rib stilk stilke
sprig|count|0|takje zweig zweige szál brin branche ramita kvist kvister stängel
piece|count|0|pc pcs chunk stk stück stuks nos adet db ks unid unidade \
sztuka sztuki szt pièce unité 个
sheet|count|0|vel rolle rulle
loaf|count|0|loaves
block|count|0|log
cube|count|0|blokje tablete
batch|count|0|batches
leaf|count|0|leaves
glass|count|0|glasses wineglass wineglasses
"""
# Pieces without other spellings.
_PIECES = """
jar bottle bag carton punnet basket bar drop drizzle squeeze stick head bulb strip ball wedge ear
square scoop rack part recipe serving tray
"""

# Units that need no number: "pinch of salt", "cup butter"
STARTERS = frozenset(
    """
    pinch dash drop splash drizzle squeeze glug knob handful slice bunch sprig strip sheet piece
    wedge scoop cup teaspoon tablespoon tray
    """.split()  # noqa: SIM905
)

# Units that need a size: "1 (16 ounce) can"
CONTAINERS = frozenset(
    """
    can package sachet jar bottle bag box carton container punnet pouch basket bar
    """.split()  # noqa: SIM905
)

# Units written after the food ("2 garlic cloves"), with their foods; None means any food.
LATE: dict[str, frozenset[str] | None] = {
    "clove": frozenset({"garlic"}),
    "stalk": frozenset({"celery", "lemongrass", "grass", "rhubarb"}),
    "stick": frozenset({"celery"}),
    "head": frozenset({"garlic"}),
    "leaf": frozenset({"gelatine", "gelatin"}),
    "sheet": frozenset({"gelatine", "gelatin"}),
    "loaf": None,
    "sachet": None,
    "bulb": None,
    "sprig": None,
    "slice": None,
}


def _parse_units() -> tuple[dict[str, Unit], dict[str, Unit]]:
    """Parse the table of units. Return the units by name and by spelling."""
    units: dict[str, Unit] = {}
    spellings: dict[str, Unit] = {}
    pieces = (f"{name}|count|0|" for name in _PIECES.split())
    for row in (*_TABLE.strip().splitlines(), *pieces):
        name, kind, size, others = row.split("|")
        unit = Unit(name, kind, float(size))  # type: ignore[arg-type]  # a word of the table above
        units[name] = unit
        for word in (name, *others.split()):
            spellings[word] = unit
            if len(word) > 2:
                spellings.setdefault(word + "s", unit)
    return units, spellings


UNITS, SPELLINGS = _parse_units()  # in lower case, except "T" for a tablespoon


LATE_SPELLINGS = frozenset(
    word for word, unit in SPELLINGS.items() if unit.name in LATE
)

SIZES = frozenset(
    """
    small medium large big jumbo extra-large sm md med lg lge xl medium-size medium-sized
    large-sized small-sized good-size good-sized medium-large medium-small thumb-size thumb-sized
    walnut-sized generous scant heaping heaped rounded slim pencil-thin
    little good thick thin level plump bun-size fat kleine kleiner kleines große großer grote små
    """.split()  # noqa: SIM905
)
# Words that are sizes only before a unit: "a good pinch", but "good red wine"
SIZES_OF_MEASURES = frozenset(
    "generous little good thick thin level plump bun-size fat".split()  # noqa: SIM905
)

SIZE_ADVERBS = frozenset({"very", "extra", "fairly", "evenly", "slightly"})

PACKED = frozenset({"packed", "loosely", "lightly", "firmly", "tightly", "well"})

ABOUT = frozenset(
    "about approximately approx around roughly nearly almost circa minimum weighing".split()  # noqa: SIM905
)

ADVERBS = frozenset(
    """
    finely coarsely freshly roughly thinly thickly lightly loosely firmly tightly well very
    fully partially slightly thoroughly diagonally lengthwise lengthways crosswise fresh-
    """.split()  # noqa: SIM905
)

# Participles of preparation, which do not affect the food to buy.
PREPARED = frozenset(
    """
    beaten boned bruised buttered butterflied chilled chopped cleaned cooked cooled cored
    cracked crumbled crushed cubed cut deboned deseeded deveined diced drained grated halved
    hulled juiced julienned lukewarm mashed melted minced packed peeled picked pounded pre-crumbled
    pureed puréed quartered rinsed scrubbed seeded shaved shelled shredded shucked sieved sifted
    skinned sliced slivered snipped softened squeezed stemmed stoned strained thawed toasted
    separated torn trimmed uncooked unpeeled unsifted washed well-shaken wiped zested
    """.split()  # noqa: SIM905
)

# Participles that are part of the product before these foods.
PART_OF_NAME: dict[str, frozenset[str]] = {
    "crushed": frozenset({"red", "tomatoes", "pineapple", "ice", "chilies"}),
    "diced": frozenset({"tomatoes"}),
    "minced": frozenset({"beef", "lamb", "pork", "turkey", "veal", "meat"}),
    "shredded": frozenset({"coconut", "wheat"}),
    "toasted": frozenset({"sesame"}),
    "sliced": frozenset({"almonds"}),
    "slivered": frozenset({"almonds"}),
    "cracked": frozenset({"wheat"}),
}

# Words that make the next participle part of the product: "frozen chopped spinach"
KEPT_WITH = frozenset(
    "frozen canned tinned ready jarred dried unsweetened".split()  # noqa: SIM905
)

# Words that begin a preparation after a comma.
SEGMENT_PREPARED = PREPARED | frozenset(
    """
    at skin skins bone boiled blanched roasted soaked warmed heated whisked separated divided
    broken split folded tied scored ground crosswise halves juiced dissolved mixed reserved
    stalks stems stem seeds ends leaves tops fat membrane membranes tough rind stones patted
    dried fried grilled browned poached hard-boiled hard-cooked whipped sautéed steamed
    marinated seasoned brushed each stripped shells wing in very left pitted dusted hacked
    thinned cold defrosted warm room chiffonade scraped smashed bashed podded topped layered
    brought rolled plucked shaken
    """.split()  # noqa: SIM905
)

# Words that begin a remark.
REMARKS = frozenset(
    """
    plus or such preferably optional see if about from not depending as including available with
    use using for to white like your homemade store-bought any ideally i.e e.g ie eg total
    least more and/or adjust reserved packed without
    """.split()  # noqa: SIM905
)

# Words that are not foods. A comma after them separates adjectives ("boneless, skinless ...").
QUALITIES = frozenset(
    """
    boneless skinless bone-in skin-on boned ripe firm fresh dried dry sweet hot cold warm cool
    large small medium big thick thin whole fat-free low-fat nonfat lean free-range organic
    unsalted salted unsweetened plain red green yellow white black good-quality low-sodium
    reduced-sodium firm-ripe very extra young tender mild soft hard raw frozen canned crisp
    mixed moist roasted ready-to-eat juicy crunchy light dark high-quality
    day-old stale fine coarse best-quality unwaxed unbleached strong full-fat skinned pitted long
    wide flat grilled tart refrigerated creamed pared stewed sweetened unshelled delicate
    """.split()  # noqa: SIM905
)

# Words that cannot be foods.
ADJECTIVES = QUALITIES | PREPARED | ADVERBS | {"and", "or"}

# Words after "for" or "to" that give an ingredient's purpose.
PURPOSES = frozenset(
    """
    serve serving garnish garnishing dust dusting decorate decorating decoration
    finish glaze fry frying grease greasing sprinkle sprinkling brush brushing taste deep-frying
    shallow drizzle drizzling
    spread spreading roll rolling season seasoning top topping coat coating line lining dip dipping
    dredging poach poaching cook cooking the deep egg scatter pass passing blend
    """.split()  # noqa: SIM905
)

PARTS = frozenset({"juice", "zest", "rind", "peel", "kernels", "leaves"})

UNSAID = frozenset(
    "additional extra some more optional each etwas plenty lots".split()  # noqa: SIM905
)

BEFORE_NAME = frozenset(
    "of or and x the from per plus to weight size : % , . - +".split()  # noqa: SIM905
)
# Leftover words at the ends of a name after its amount or remark is read: "or so", "made"
AFTER_NAME = frozenset(
    "and or in with made from of dissolved mixed studded to for plus at the each weighing".split()  # noqa: SIM905
)

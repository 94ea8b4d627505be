"""Units of kitchen measure: spellings, canonical names and sizes.

A unit with two sizes is the United States customary one (a cup is 236.6 ml, a pint 473 ml): its
name does not say which, and most English recipes at hand are American.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

UnitKind = Literal["mass", "volume", "length", "count"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit by its canonical name."""

    name: str
    kind: UnitKind
    size: float
    """Grams of a mass, millilitres of a volume, centimetres of a length; 0 for pieces."""


# name | kind | size | other spellings; plurals in "s" are added for words of three letters or more
_TABLE = """
gram|mass|1|g gm gr grm gms gramme gramm gramo grama grammi г 克
decagram|mass|10|dkg
kilogram|mass|1000|kg kgs kilo quilo кг
milligram|mass|0.001|mg
ounce|mass|28.35|oz ozs onz
pound|mass|453.6|lb lbs
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
can|count|0|tin lata blik blikje dose dosen dåse burk
package|count|0|pk pkg pkgs pack packet packages pkt pck päckchen paket bal förpackning
sachet|count|0|envelope zakje bustina sachê sáček sobre
jar|count|0|
bottle|count|0|
bag|count|0|
box|count|0|boxes case
carton|count|0|
container|count|0|tub pot tube
punnet|count|0|
pinch|count|0|pinches pizca pincée prise prisen snufje snuifje snuf msp krm nip \
csipet nypa pitada pizzico szczypta szczypty špetka štipka щепотка
dash|count|0|dashes
drop|count|0|
splash|count|0|splashes scheut scheutje spritzer schuss
drizzle|count|0|
squeeze|count|0|
glug|count|0|lug
knob|count|0|nub klont klontje
handful|count|0|handsful handfull handje handvol handvoll poignée
slice|count|0|rasher φετ rodaja tranche scheibe scheiben plak plakje plakken skiva skivor fetta
bunch|count|0|bunches bosje bund bd bunt manojo knippe botte
stalk|count|0|rib stilk stilke
stick|count|0|
head|count|0|
bulb|count|0|
sprig|count|0|takje zweig zweige szál brin branche ramita kvist kvister stängel
strip|count|0|
piece|count|0|pc pcs chunk stk stück stuks adet db ks unid unidade \
sztuka sztuki szt pièce unité 个
sheet|count|0|vel rolle rulle
loaf|count|0|loaves
ball|count|0|
block|count|0|log
wedge|count|0|
ear|count|0|
cube|count|0|blokje tablete
square|count|0|
scoop|count|0|
rack|count|0|
part|count|0|
batch|count|0|batches
recipe|count|0|
serving|count|0|
leaf|count|0|leaves
glass|count|0|glasses wineglass wineglasses
"""

STARTERS: Final = frozenset(
    {"pinch", "dash", "drop", "splash", "drizzle", "squeeze", "glug", "knob", "handful", "slice",
     "bunch", "sprig", "strip", "sheet", "piece", "wedge", "scoop", "cup", "teaspoon", "tablespoon"}
)  # fmt: skip
"""Units that need no number: "pinch of salt", "cup butter"."""

CONTAINERS: Final = frozenset(
    {"can", "package", "sachet", "jar", "bottle", "bag", "box", "carton", "container", "punnet"}
)
"""Units whose size has to be given: "1 (16 ounce) can"."""

LATE: Final[dict[str, frozenset[str] | None]] = {
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
"""Units written after the food ("2 garlic cloves"), with the foods that take them; None: any."""


def _spellings() -> tuple[dict[str, Unit], dict[str, Unit]]:
    units: dict[str, Unit] = {}
    spellings: dict[str, Unit] = {}
    for row in _TABLE.strip().splitlines():
        name, kind, size, others = row.split("|")
        unit = Unit(name, kind, float(size))  # type: ignore[arg-type]  # a word of the table above
        units[name] = unit
        for word in (name, *others.split()):
            spellings[word] = unit
            if len(word) > 2:
                spellings.setdefault(word + "s", unit)
    return units, spellings


UNITS, SPELLINGS = _spellings()
"""Units by name; and by every spelling, in lower case but for "T", a tablespoon."""


LATE_SPELLINGS: Final = frozenset(word for word, unit in SPELLINGS.items() if unit.name in LATE)

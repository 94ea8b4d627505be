"""Vocabulary of ingredient lines: sizes, preparations, remarks."""

from __future__ import annotations

from typing import Final

SIZES: Final = frozenset(
    """
    small medium large big jumbo extra-large sm md med lg lge xl medium-size medium-sized
    large-sized small-sized good-size good-sized medium-large medium-small thumb-size thumb-sized
    walnut-sized generous scant heaping heaped rounded slim pencil-thin
    little good thick thin level plump bun-size fat kleine kleiner kleines große großer grote små
    """.split()  # noqa: SIM905
)
SIZES_OF_MEASURES: Final = frozenset(
    "generous little good thick thin level plump bun-size fat".split()  # noqa: SIM905
)
"""Sizes only before a unit: "a good pinch", but "good red wine"."""

SIZE_ADVERBS: Final = frozenset({"very", "extra", "fairly", "evenly", "slightly"})

PACKED: Final = frozenset({"packed", "loosely", "lightly", "firmly", "tightly", "well"})
"""Words between a number and its unit: "2 packed cups"."""

ABOUT: Final = frozenset(
    "about approximately approx around roughly nearly almost circa minimum weighing".split()  # noqa: SIM905
)

ADVERBS: Final = frozenset(
    """
    finely coarsely freshly roughly thinly thickly lightly loosely firmly tightly well very
    fully partially slightly thoroughly diagonally lengthwise lengthways crosswise fresh-
    """.split()  # noqa: SIM905
)

PREPARED: Final = frozenset(
    """
    beaten boned bruised buttered butterflied chilled chopped cleaned cooked cooled cored
    cracked crumbled crushed cubed cut deboned deseeded deveined diced drained grated halved
    hulled julienned lukewarm mashed melted minced packed peeled picked pounded pre-crumbled
    pureed puréed quartered rinsed scrubbed seeded shaved shelled shredded shucked sieved sifted
    skinned sliced slivered snipped softened squeezed stemmed stoned strained thawed toasted
    separated torn trimmed uncooked unpeeled unsifted washed well-shaken wiped zested
    """.split()  # noqa: SIM905
)
"""Participles of preparation, which do not tell which food to buy."""

PART_OF_NAME: Final[dict[str, frozenset[str]]] = {
    "crushed": frozenset({"red", "tomatoes", "pineapple", "ice", "chilies"}),
    "diced": frozenset({"tomatoes"}),
    "minced": frozenset({"beef", "lamb", "pork", "turkey", "veal", "meat"}),
    "shredded": frozenset({"coconut", "wheat"}),
    "toasted": frozenset({"sesame"}),
    "sliced": frozenset({"almonds"}),
    "slivered": frozenset({"almonds"}),
    "cracked": frozenset({"wheat"}),
}
"""Participles that are part of what is bought before these foods."""

KEPT_WITH: Final = frozenset(
    {"frozen", "canned", "tinned", "ready", "jarred", "dried", "unsweetened"}
)
"""Before a participle they make it part of what is bought: "frozen chopped spinach"."""

SEGMENT_PREPARED: Final = PREPARED | frozenset(
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
"""Words that open a preparation after a comma."""

REMARKS: Final = frozenset(
    """
    plus or such preferably optional see if about from not depending as including available with
    use using for to white like your homemade store-bought any ideally i.e e.g ie eg total
    least more and/or adjust reserved packed without
    """.split()  # noqa: SIM905
)
"""Words that open a remark."""

QUALITIES: Final = frozenset(
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
"""Words that are no food; a comma after them separates adjectives ("boneless, skinless ...")."""

ADJECTIVES: Final = QUALITIES | PREPARED | ADVERBS | {"and", "or"}
"""Words of which none can be a food."""

PURPOSES: Final = frozenset(
    """
    serve serving garnish garnishing dust dusting decorate decorating decoration
    finish glaze fry frying grease greasing sprinkle sprinkling brush brushing taste deep-frying
    shallow drizzle drizzling
    spread spreading roll rolling season seasoning top topping coat coating line lining dip dipping
    dredging poach poaching cook cooking the deep egg scatter pass passing blend
    """.split()  # noqa: SIM905
)
"""Words after "for" or "to" that give an ingredient's purpose."""

PARTS: Final = frozenset({"juice", "zest", "rind", "peel", "kernels", "leaves"})
"""Parts of a fruit: "juice of 1 lemon", "grated zest and juice of 2 limes"."""

UNSAID: Final = frozenset("additional extra some more optional each etwas plenty lots".split())  # noqa: SIM905
"""Words before a name that say nothing about the food ("additional breadcrumbs")."""

BEFORE_NAME: Final = frozenset("of or and x the from per plus to weight size : % , . - +".split())  # noqa: SIM905
AFTER_NAME: Final = frozenset(
    "and or in with made from of dissolved mixed studded to for plus at the".split()  # noqa: SIM905
)
"""Words that are left at the ends of a name when what they belong to is read: "or so", "made"."""

"""Makes src/toque/cooking/usual_shares.tsv from recipes.

    python tools/make_usual_shares.py RECIPES.jsonl.gz

Each line of the input has a "title" and "ingredients". Every second recipe is counted. For each
dish and food, the table has the 3rd and 97th percentiles of the food's share of the weight of all
ingredients. The dish "*" stands for all dishes.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from toque.cooking.dish_steps import dish_of_title
from toque.cooking.labels.features import line_facts

TABLE = Path(__file__).parents[1] / "src" / "toque" / "cooking" / "usual_shares.tsv"
LOW, HIGH = 0.03, 0.97
MIN_RECIPES = 40
MIN_FOODS = 3


def main(path: str) -> None:
    """Write the table."""
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % 2:
                continue
            recipe = json.loads(line)
            grams: Counter[str] = Counter()
            for facts in map(line_facts, recipe["ingredients"]):
                if facts.food is not None and facts.grams > 0.0:
                    grams[facts.food.name] += facts.grams
            if len(grams) < MIN_FOODS:
                continue
            total = sum(grams.values())
            for food, weight in grams.items():
                for dish in ("*", dish_of_title(recipe["title"])):
                    shares[dish, food].append(weight / total)

    rows = ["dish\tfood\tlow\thigh"]
    for (dish, food), values in sorted(shares.items()):
        if dish and len(values) >= MIN_RECIPES:
            values.sort()
            low, high = (values[int(q * (len(values) - 1))] for q in (LOW, HIGH))
            rows.append(f"{dish}\t{food}\t{low:.2g}\t{high:.2g}")
    TABLE.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

"""Check the search of the built site: it finds every recipe of docs/recipes.md by its name.

`python scripts/check_site.py [FOLDER]`, where FOLDER is the built site, site/ by default. Text is cut into
terms as the search in the browser does it: by the separator of mkdocs.yml, in lower case.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from workspace import ROOT, finish

RECIPES = ROOT / "docs" / "recipes.md"
SECTION = re.compile(r"<!-- begin \w+ recipes: .*?<!-- end", re.S)
ROW = re.compile(r"^\| `([^`]+)` \|", re.M)


def recipes(page: str) -> list[str]:
    """The names in the first column of the generated tables of a page."""
    return [name for section in SECTION.findall(page) for name in ROW.findall(section)]


def terms(text: str, separator: str) -> set[str]:
    """What the search looks up: the parts between separators, without punctuation at their ends."""
    plain = html.unescape(re.sub(r"<[^>]+>", "", text)).lower()
    return {re.sub(r"^\W+|\W+$", "", part) for part in re.split(separator, plain)} - {""}


def unfound(names: list[str], index: dict[str, Any]) -> list[str]:
    """The names of which no one entry of a search index has all terms."""
    separator = index["config"]["separator"]
    # JavaScript and Python write this syntax alike
    entries = [terms(f"{doc['title']} {doc['text']}", separator) for doc in index["docs"]]
    return [name for name in names if not any(terms(name, separator) <= one for one in entries)]


def main(site: Path) -> int:
    """Print the recipes that the search does not find."""
    names = recipes(RECIPES.read_text(encoding="utf-8"))
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    problems = [f"the search does not find the recipe {name!r}" for name in unfound(names, index)]
    if not names:
        problems.append(f"{RECIPES.relative_to(ROOT)} has no tables of recipes")
    return finish(problems, f"search for {len(names)} recipes")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"))

"""The check of the site's search, and the picture of the front page."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import check_site
import generate_picture
from check_site import recipes, terms, unfound

SEPARATOR = r"[\s\-,:=()\"`]+"
PAGE = """# Recipes

| `not_in_a_section` | x |

<!-- begin storage recipes: script.py -->

| recipe | what |
| --- | --- |
| `int4_weight_only` | 4 bits |
| `int4_weight_only/g32-asymmetric` | 4 bits, small groups |

<!-- end storage recipes -->
<!-- begin compute recipes: script.py -->

| recipe | what |
| --- | --- |
| `float8/rowwise` | float8 |

<!-- end compute recipes -->
"""


def index(*texts, separator=SEPARATOR):
    docs = [{"location": "p/", "title": "", "text": text} for text in texts]
    return {"config": {"separator": separator}, "docs": docs}


def test_recipes_are_the_first_column_of_the_generated_tables():
    assert recipes(PAGE) == [
        "int4_weight_only",
        "int4_weight_only/g32-asymmetric",
        "float8/rowwise",
    ]


def test_terms_are_cut_as_the_browser_cuts_them():
    found = terms("<code>int4_weight_only/g32-asymmetric</code>, Float8 &amp; (more).", SEPARATOR)
    assert found == {"int4_weight_only/g32", "asymmetric", "float8", "more"}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("<code>int4/g32-small</code> of ao-quant", []),
        ("small groups, as in int4/g32", []),
        ("int4/g32", ["int4/g32-small"]),
        ("int4/g32x and small", ["int4/g32-small"]),
        ("", ["int4/g32-small"]),
    ],
)
def test_a_name_is_found_by_all_its_terms_in_one_entry(text, missing):
    assert unfound(["int4/g32-small"], index(text)) == missing


def test_terms_in_two_entries_are_not_enough():
    assert unfound(["int4/g32-small"], index("int4/g32", "small")) == ["int4/g32-small"]


def test_a_separator_that_leaves_punctuation_is_noticed():
    assert unfound(["int4"], index("int4=4 bits", separator=r"[\s]+")) == ["int4"]


def built(folder, *texts):
    (folder / "search").mkdir()
    path = folder / "search" / "search_index.json"
    path.write_text(json.dumps(index(*texts)), encoding="utf-8")
    return folder


def test_the_check_passes_where_the_page_is_indexed(tmp_path, capsys):
    text = check_site.RECIPES.read_text(encoding="utf-8")
    assert check_site.main(built(tmp_path, text)) == 0
    assert "ok" in capsys.readouterr().out


def test_the_check_names_what_is_not_found(tmp_path, capsys):
    assert check_site.main(built(tmp_path, "nothing")) == 1
    assert "does not find the recipe 'int4_weight_only'" in capsys.readouterr().err


QUALITY = {
    "rows": [
        {"name": "float32", "bytes": 8_000_000, "kl_nats": 0.0},
        *({"name": name, "bytes": 2_000_000, "kl_nats": 0.25} for name in generate_picture.SIZES),
    ]
}
BARS = {
    "about": {"cores": 2},
    "rows": [{"case": case, "measured": 3.0} for case in generate_picture.SPEEDS],
}


def test_the_picture_draws_the_recorded_numbers():
    drawn = ElementTree.fromstring(generate_picture.picture(QUALITY, BARS))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in drawn.iter(f"{space}text")]
    assert texts.count("2 MB, KL 0.250") == len(generate_picture.SIZES)
    assert texts.count("3.0 ×") == len(generate_picture.SPEEDS)
    widths = [float(element.get("width", "0")) for element in drawn.iter(f"{space}rect")]
    full = generate_picture.WIDTH
    small, fast = len(generate_picture.SIZES), len(generate_picture.SPEEDS)
    expected = [full, full / 2, *[full / 4] * small, full / 3, *[full] * fast]
    assert widths == pytest.approx(expected, abs=0.06)
    height = float(drawn.get("viewBox", "").split()[3])
    ends = [
        float(e.get("y", "0")) + float(e.get("height", "0")) for e in drawn.iter(f"{space}rect")
    ]
    assert max(ends) <= height


def test_a_result_that_is_gone_is_an_error():
    with pytest.raises(KeyError, match="decoding"):
        generate_picture.picture(QUALITY, {**BARS, "rows": BARS["rows"][:1]})


def test_the_picture_is_fresh(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate_picture.py", "--check"])
    assert generate_picture.main() == 0


def test_a_stale_picture_is_noticed_and_mended(monkeypatch, tmp_path, capsys):
    path = tmp_path / "size-speed.svg"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(generate_picture, "ROOT", tmp_path)
    monkeypatch.setattr(generate_picture, "PICTURE", path)
    monkeypatch.setattr(sys, "argv", ["generate_picture.py", "--check"])
    assert generate_picture.main() == 1
    assert "run scripts/generate_picture.py" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["generate_picture.py"])
    assert generate_picture.main() == 0
    assert path.read_text(encoding="utf-8").startswith("<svg")

"""Drawing pairs of texts from Python sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from minilm_demo.corpus import docstring_pairs, split_docstring

_LONG = "It returns everything that was found, in order, as a list."


def _source(path: Path, *docstrings: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    functions = [f"def f{i}():\n    {text!r}\n" for i, text in enumerate(docstrings)]
    path.write_text("\n".join(functions), encoding="utf-8")


@pytest.mark.parametrize(
    ("docstring", "query", "document"),
    [
        ("Find a thing. Return it.", "Find a thing.", "Return it."),
        ("Find a\n  thing.\n\nReturn it.", "Find a thing.", "Return it."),
        ("Find a thing\n\nReturn it", "Find a thing", "Return it"),
        ("Use v1.2 of e.g. this. More.", "Use v1.2 of e.g. this.", "More."),
        ("Find it.", "Find it.", ""),
    ],
)
def test_split(docstring: str, query: str, document: str) -> None:
    assert split_docstring(docstring) == (query, document)


def test_pairs_are_distinct_and_come_in_order_of_name(tmp_path: Path) -> None:
    _source(tmp_path / "b.py", f"Find all of the things. {_LONG}")
    _source(tmp_path / "a" / "z.py", f"Read all of the things. {_LONG} Twice.")
    _source(tmp_path / "c.py", f"Find all of the things. {_LONG} Again.")  # the query was seen
    _source(tmp_path / "d.py", f"Write all of the things. {_LONG}")  # the document was seen
    _source(tmp_path / "e.py", "Too short. Indeed.")
    _source(tmp_path / "test" / "f.py", f"Test all of the things. {_LONG} Three times.")
    (tmp_path / "g.py").write_text("def broken(", encoding="utf-8")

    pairs = docstring_pairs(2, tmp_path)

    assert [pair.name for pair in pairs] == ["a.z:f0", "b:f0"]
    assert pairs[1] == ("Find all of the things.", _LONG, "b:f0")


def test_pairs_are_spread_over_all_there_are(tmp_path: Path) -> None:
    for number in range(10):
        text = f"Find thing number {number} of all. {_LONG} {number}"
        _source(tmp_path / f"m{number}.py", text)
    names = [pair.name for pair in docstring_pairs(5, tmp_path)]
    assert names == ["m0:f0", "m2:f0", "m4:f0", "m6:f0", "m8:f0"]


def test_no_module_dominates(tmp_path: Path) -> None:
    _source(tmp_path / "a.py", *(f"Find thing number {i} of all. {_LONG} {i}" for i in range(99)))
    with pytest.raises(ValueError, match="count=25, but .* has only 24 usable docstrings"):
        docstring_pairs(25, tmp_path)


def test_the_standard_library_has_a_thousand_pairs_the_same_in_every_process() -> None:
    pairs = docstring_pairs(1000)
    assert len({pair.query for pair in pairs}) == len({pair.document for pair in pairs}) == 1000

    script = "from minilm_demo.corpus import docstring_pairs; print(ascii(docstring_pairs(1000)))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == ascii(pairs)

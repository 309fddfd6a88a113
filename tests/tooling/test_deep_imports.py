from __future__ import annotations

import subprocess

import pytest

from deep_imports import INSIDE, ROOT, doors, imports, problems

CORE = {
    "__init__.py": '__all__ = ["Spec", "kernels"]',
    "tensor.py": "",
    "kernels.py": "",
    "ext/__init__.py": '__all__ = ["repack"]',
    "ext/numerics.py": '__all__ = ["sqnr", "Spec"]',
    "testing/__init__.py": '__all__ = ["DTypeSuite"]',
}


@pytest.fixture
def found(tmp_path):
    """`found({"docs/a.md": "…"})`: what is said of a workspace with a small ao-core and these files."""

    def check(files):
        core = {f"packages/ao-core/src/ao_core/{name}": text for name, text in CORE.items()}
        for place, text in (core | files).items():
            path = tmp_path / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        return problems(tmp_path)

    return check


def test_names_and_their_doors():
    known = doors(ROOT / "packages" / "ao-core" / "src" / "ao_core")
    assert known["Spec"] == known["quantize_"] == "ao_core"
    assert known["repack"] == "ao_core.ext"
    assert known["sqnr"] == "ao_core.ext.numerics"
    assert known["KernelSuite"] == "ao_core.testing"


@pytest.mark.parametrize(
    ("line", "text", "advice"),
    [
        (1, "from ao_core.tensor import repack", "write `from ao_core.ext import repack`"),
        (1, "from ao_core.tensor import Spec as S", "write `from ao_core import Spec`"),
        (2, "def f():\n    import ao_core.tensor", "no door exports it"),
        (1, "from ao_core import tensor", "no door exports it"),
        (2, "import ao_core\nao_core.tensor.sqnr", "no door exports it"),
        (1, 'set("ao_core.tensor.sqnr", 1)', "write `from ao_core.ext.numerics import sqnr`"),
        (3, 'P = """\nimport os\n  from ao_core.tensor import a\n"""', "no door exports it"),
    ],
)
def test_deep_imports_are_found(found, line, text, advice):
    (problem,) = found({"packages/ao-one/tests/test_one.py": text})
    assert problem.startswith(f"packages/ao-one/tests/test_one.py:{line}: ao_core.tensor")
    assert advice in problem


def test_pages_are_read(found):
    page = "# Title\n\n```python\nfrom ao_core.tensor import (\n    repack,\n)\n```\n"
    (line,) = found({"docs/page.md": page})
    assert line.startswith("docs/page.md:4: ao_core.tensor.repack is inside ao_core; write `from")


def test_what_is_public_passes(found):
    text = """\
import ao_core
from ao_core import Spec, kernels
from ao_core.ext.numerics import sqnr
from ao_core.testing.base import gaussian

ao_core.kernels
"""
    assert not found(
        {"tests/test_one.py": text, "packages/ao-core/tests/a.py": "import ao_core.tensor"}
    )


def test_nothing_is_allowed_that_nobody_needs():
    for place, parts in INSIDE.items():
        modules = {f"{one.module}.{one.name}".split(".")[1] for one in imports(ROOT / place)
                   if one.module.startswith("ao_core")}  # fmt: skip
        assert modules.issuperset(parts), place

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import ao_kernels


def test_version_is_that_of_the_distribution():
    assert ao_kernels.__version__ == version("ao-kernels")


def test_what_is_installed_holds_no_checks_and_imports_none():
    assert find_spec("ao_kernels.testing") is None
    assert find_spec("ao_kernels.triton.gates") is None
    sources = list(Path(ao_kernels.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "ao_triton_checks" not in text
        assert "kernel_checks" not in text

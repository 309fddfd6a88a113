from importlib.metadata import version

import ao_float8


def test_version_is_that_of_the_distribution():
    assert ao_float8.__version__ == version("ao-float8")

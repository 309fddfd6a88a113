from importlib.metadata import version

import ao_hf


def test_version_is_that_of_the_distribution():
    assert ao_hf.__version__ == version("ao-hf")

from importlib.metadata import version

import ao_NAME


def test_version_is_that_of_the_distribution():
    assert ao_NAME.__version__ == version("ao-NAME")

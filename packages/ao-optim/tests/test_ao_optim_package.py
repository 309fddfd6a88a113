from importlib.metadata import version

import ao_optim


def test_version_is_that_of_the_distribution():
    assert ao_optim.__version__ == version("ao-optim")

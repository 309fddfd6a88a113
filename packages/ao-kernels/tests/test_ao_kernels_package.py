from importlib.metadata import version

import ao_kernels


def test_version_is_that_of_the_distribution():
    assert ao_kernels.__version__ == version("ao-kernels")

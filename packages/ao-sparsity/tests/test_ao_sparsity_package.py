from importlib.metadata import version

import ao_sparsity


def test_version_is_that_of_the_distribution():
    assert ao_sparsity.__version__ == version("ao-sparsity")

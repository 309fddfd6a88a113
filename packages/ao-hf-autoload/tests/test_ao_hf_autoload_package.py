from importlib.metadata import version

import ao_hf_autoload
from ao_core.ext import plugins, problems


def test_version_is_that_of_the_distribution():
    assert ao_hf_autoload.__version__ == version("ao-hf-autoload")


def test_plugin_is_loaded():
    assert "hf_autoload" in [info.name for info in plugins()]
    assert not [problem for problem in problems() if "autoload" in str(problem)]

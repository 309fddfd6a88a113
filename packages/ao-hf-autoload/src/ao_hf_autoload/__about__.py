"""The version of ao-hf-autoload; `nox -s release` sets it."""

__version__ = "0.1.0"

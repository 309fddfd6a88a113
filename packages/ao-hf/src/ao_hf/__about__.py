"""The version of ao-hf; `nox -s release` sets it."""

__version__ = "0.1.0"

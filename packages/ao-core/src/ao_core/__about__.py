"""The version of ao-core; `nox -s release` sets it."""

__version__ = "0.1.0"

"""The version of ao-NAME; `nox -s release` sets it."""

__version__ = "0.1.0"

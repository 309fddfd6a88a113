"""The version of ao-float8; `nox -s release` sets it."""

__version__ = "0.1.0"

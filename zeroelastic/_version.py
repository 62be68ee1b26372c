"""The version, kept in one place for the package and its metadata."""

__version__ = "0.3.0"

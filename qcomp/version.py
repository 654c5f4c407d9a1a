"""The release, in a module that everything may import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""The release, such as "0.1.0"."""

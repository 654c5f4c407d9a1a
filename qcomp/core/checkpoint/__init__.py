"""Saved states: their format, and how a world of other ranks loads them."""

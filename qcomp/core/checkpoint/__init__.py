"""Saved states: their format, their copies on other nodes, and how another world loads them."""

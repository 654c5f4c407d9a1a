"""Saved states: their format, their copies on other nodes, and how another number of ranks loads them."""

"""Saved states: their format, their copies on other nodes, and how a different number of ranks loads them."""

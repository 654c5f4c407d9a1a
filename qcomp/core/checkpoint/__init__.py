"""Saved states: their format, and how one world loads those of another."""

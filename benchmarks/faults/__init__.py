"""Ranks that are killed or stopped in the middle of what they do."""

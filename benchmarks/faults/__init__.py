"""Ranks that are killed, stopped or unplugged while they exchange or train."""

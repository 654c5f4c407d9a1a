"""Arithmetic on arrays of any library: array helpers, random draws, sums, buckets and bit planes."""

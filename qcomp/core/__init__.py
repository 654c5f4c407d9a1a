"""The pure part: algorithms over explicit, immutable state, without I/O, for any Array-API library."""

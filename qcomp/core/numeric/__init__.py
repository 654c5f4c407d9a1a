"""Numbers and arrays for every library: one namespace, one random stream, the same bytes."""

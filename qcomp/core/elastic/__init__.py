"""Steps that survive the loss of ranks: the pure part."""

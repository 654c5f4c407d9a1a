"""Steps that outlive ranks, in the core."""

"""Who sends what to whom: one topology a file."""

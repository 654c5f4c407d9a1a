"""Which tensors are compressed, and by what."""

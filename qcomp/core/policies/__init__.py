"""Policies: which tensors are compressed, and by which compressors."""

"""The compressed mean over ranks."""

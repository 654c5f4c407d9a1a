"""Topologies, one per file: who sends what to whom. `qcomp.topologies` and `qcomp.extend` are the public side."""

"""Topologies, one a file: who sends what to whom. `qcomp.topologies` and `qcomp.extend` are their public side."""

"""Topologies, one a file: who sends what to whom. `qcomp.topologies` has what a topology of your own is made of."""

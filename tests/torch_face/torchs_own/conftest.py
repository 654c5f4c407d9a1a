"""The tests that torch has for its optimizers, with optimizers of qcomp in the place of torch's."""

collect_ignore = ["like_optim.py", "program.py"]  # import what changes torch's settings

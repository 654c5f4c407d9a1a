"""Three training tasks, and the optimizers compared on them at equal steps."""

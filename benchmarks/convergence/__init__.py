"""Three training tasks, and the optimizers that are compared on them at equal steps."""

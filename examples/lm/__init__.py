"""The parts of `train_lm.py`: data, model, training loop, checkpoints and report."""

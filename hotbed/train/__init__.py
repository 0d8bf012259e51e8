"""Batches in, a trained model out: step, loop, evaluation, checkpoints, and the folder of a run."""

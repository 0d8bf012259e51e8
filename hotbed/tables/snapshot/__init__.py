"""Rows as of one moment, for checkpoints, and back."""

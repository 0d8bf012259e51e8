"""Rows, dense weights and all else a run needs, on disk, whole or not at all."""

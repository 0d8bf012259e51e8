"""Logs that never end: what has arrived in, batches out, each row once, in an order that a resumed run repeats."""

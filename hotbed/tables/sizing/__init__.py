"""Bytes: the share of each tier in a budget, the size of tables and models, and whether they fit."""

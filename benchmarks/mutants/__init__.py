"""Careless changes to the sources, one at a time, and whether a test notices."""

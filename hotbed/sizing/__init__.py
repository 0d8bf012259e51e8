"""Bytes: what each tier gets of a budget, what tables and models take, and whether it fits."""

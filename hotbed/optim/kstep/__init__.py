"""k-step Adam for dense weights."""

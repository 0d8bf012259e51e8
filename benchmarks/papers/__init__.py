"""The published systems that hotbed makes real, claim by claim."""

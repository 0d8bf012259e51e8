"""`hotbed tune`: many short runs in, the settings of the best out."""

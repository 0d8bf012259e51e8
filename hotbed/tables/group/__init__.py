"""Tables of one record width, stored and looked up together."""

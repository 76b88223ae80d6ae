"""A module of a script's own, which is imported again with it."""

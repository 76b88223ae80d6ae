"""HOW DO WE TALK: collectives over a fixed group of ranks."""

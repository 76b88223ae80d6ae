"""How ranks communicate: collectives over a fixed group of ranks."""

"""How a pass is fed: its data, its batches, and where it stands in them."""

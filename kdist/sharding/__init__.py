"""State of which each rank holds its part: optimizer slots (ZeRO stages 1 and 2), and embedding tables by rows."""

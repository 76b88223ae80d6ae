"""Optimizer state in parts: each rank updates its part of every weight (ZeRO stages 1 and 2)."""

"""The state of a training: its parts, where each lives, and how ranks compare and exchange it."""

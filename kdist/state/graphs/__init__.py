"""Graphs of steps: what an assignment adds to a variable."""

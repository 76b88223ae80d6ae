"""Graphs of steps: which tensors differ between ranks, and what an assignment adds to a variable."""

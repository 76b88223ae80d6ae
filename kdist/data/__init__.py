"""WHO GETS WHICH SAMPLE: one file per kind of input."""

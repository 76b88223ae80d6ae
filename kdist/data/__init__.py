"""Which rank gets which sample: one file per kind of input."""

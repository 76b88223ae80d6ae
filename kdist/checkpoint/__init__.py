"""Save, resume and preempt: whole files, directory locks, positions in the data."""

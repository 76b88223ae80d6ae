"""Where checkpoints and models are written and read: whole files, arrays in them, locks, copies in memory."""

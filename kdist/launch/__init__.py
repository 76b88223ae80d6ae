"""HOW ARE PROCESSES MADE: builders of launchers' command lines, and the worker that runs a script."""

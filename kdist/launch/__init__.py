"""HOW ARE PROCESSES MADE: command lines of launchers, the worker that runs the script, and the end of a job."""

"""How processes are started: the command lines of launchers, the program of each rank, and the end of a job."""

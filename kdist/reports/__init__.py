"""What a job shows of itself: the output of ranks, the log, and the report of a failure."""

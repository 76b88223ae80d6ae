"""What of a step's graph is a mean or a sum over rows, and what holds rows that are each computed from one."""

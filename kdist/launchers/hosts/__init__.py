"""The hosts of a job: how they are named, which of them answer, and how many ranks each takes."""

"""Restarts of a job: what ranks report, why an attempt ended, whether another one follows, and the summary."""

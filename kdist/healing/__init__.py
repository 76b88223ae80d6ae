"""Healing in process: the ranks that are left when one was killed run the script again, without a new process."""

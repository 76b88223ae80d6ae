"""What a user reads at the end of a job after twenty typical mistakes."""

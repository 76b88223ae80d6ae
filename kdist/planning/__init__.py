"""What a training will hold in memory on each rank, before it runs: `kdist.plan` and `kdist plan`."""

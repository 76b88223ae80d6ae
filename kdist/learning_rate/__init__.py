"""The learning rate that updates use, beside the user's: its scale, its warm-up, agreement on changes of it."""

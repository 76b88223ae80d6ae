"""`kdist.launch`: a function on several processes."""

"""The life of one `fit`: the replicated model, its feed, epochs and callbacks."""

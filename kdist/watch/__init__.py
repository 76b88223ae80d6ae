"""Which ranks are alive: heartbeats between ranks, beside the collectives, and a failure detector that reads them."""

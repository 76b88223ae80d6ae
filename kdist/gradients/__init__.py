"""The gradient reducer: the order, the messages and the compression in which gradients are summed."""

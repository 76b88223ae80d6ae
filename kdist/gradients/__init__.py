"""HOW DO GRADIENTS TRAVEL: in which order, in how many messages, in how many bytes."""

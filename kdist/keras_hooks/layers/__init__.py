"""What kdist does to layers of Keras."""

"""Keras' private parts: the only room that names them, and the one mechanism that patches."""

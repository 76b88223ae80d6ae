"""Keras' `fit`: its loop, what adapts its data, its callbacks."""

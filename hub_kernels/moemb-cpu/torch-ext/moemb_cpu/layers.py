"""Layers for `kernels.kernelize`."""

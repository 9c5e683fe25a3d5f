"""Sampling on the device, and log-probabilities."""

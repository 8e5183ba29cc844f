"""Hydra launcher `ranks`."""

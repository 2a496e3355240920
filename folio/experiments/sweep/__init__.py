"""Sweeps: many runs with different settings, and their comparison."""

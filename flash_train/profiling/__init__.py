"""Measurements of memory, of attention, and of ablations."""

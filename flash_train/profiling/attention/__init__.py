"""The speed and memory of attention, measured against other implementations."""

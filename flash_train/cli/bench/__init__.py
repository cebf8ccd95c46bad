"""Shared by the benchmark commands: their cases and their records."""

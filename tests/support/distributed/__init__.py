"""Helpers for tests with several ranks."""

"""Attention to a cache of keys and values: the call, its operators, and the rows of the cache."""

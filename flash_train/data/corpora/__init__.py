"""Corpora: where documents come from. Each yields them in a fixed order and has a fingerprint of their content."""

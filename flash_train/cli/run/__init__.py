"""One training run: what it is made of, and what happens before, during and after it."""

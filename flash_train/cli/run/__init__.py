"""One training run: what it is made of, what happens before and during it, and the files that it leaves."""

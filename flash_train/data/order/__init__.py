"""Which rows a batch has: their order, their division among ranks, and how many a run has consumed."""

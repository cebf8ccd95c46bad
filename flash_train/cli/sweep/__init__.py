"""Commands of many runs: the trials of an ablation, and the search for the longest row that trains."""

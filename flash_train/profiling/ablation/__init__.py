"""The results of an ablation as tables and plots."""

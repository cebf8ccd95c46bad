"""The command line: compose → build → run, a file per command. The only place that knows Hydra."""

#!/usr/bin/env python
"""Predicted and measured memory; see flash_train/cli/bench_memory.py."""

import sys

from flash_train.cli.bench_memory import main

if __name__ == "__main__":
    sys.exit(main())

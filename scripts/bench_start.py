#!/usr/bin/env python
"""From a command to its first step; see flash_train/cli/bench_start.py."""

import sys

from flash_train.cli.bench_start import main

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Training speed, compared with a peer; see flash_train/cli/bench_training.py."""

import sys

from flash_train.cli.bench_training import main

if __name__ == "__main__":
    sys.exit(main())

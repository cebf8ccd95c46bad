#!/usr/bin/env python
"""The speed of attention over a row that several GPUs share; see flash_train/cli/bench_parallel.py."""

import sys

from flash_train.cli.bench_parallel import main

if __name__ == "__main__":
    sys.exit(main())

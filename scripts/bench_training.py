#!/usr/bin/env python
"""Training, compared with transformers and Liger; see flash_train/cli/bench_training.py."""

import sys

from flash_train.cli.bench_training import main

if __name__ == "__main__":
    sys.exit(main())

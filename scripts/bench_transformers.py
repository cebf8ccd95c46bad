#!/usr/bin/env python
"""Attention functions of transformers, compared in one model; see flash_train/cli/bench_transformers.py."""

import sys

from flash_train.cli.bench_transformers import main

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Run directories into one JSON record; see flash_train/cli/collect_runs.py."""

import sys

from flash_train.cli.collect_runs import main

if __name__ == "__main__":
    sys.exit(main())

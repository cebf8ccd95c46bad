#!/usr/bin/env python
"""Tile shapes of the attention kernels for this GPU; see flash_train/cli/tune_attention.py."""

import sys

from flash_train.cli.tune_attention import main

if __name__ == "__main__":
    sys.exit(main())

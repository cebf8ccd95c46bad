#!/usr/bin/env python
"""The speed of attention, compared with FlashAttention-2 and cuDNN; see flash_train/cli/bench_attention.py."""

import sys

from flash_train.cli.bench_attention import main

if __name__ == "__main__":
    sys.exit(main())

"""`python scripts/train.py seq_len=16384` from a checkout; the same as the installed `flash-train`."""

from flash_train.cli.train import main

if __name__ == "__main__":
    main()

"""`python scripts/profile_memory.py seq_len=16384` from a checkout; the same as the installed `flash-train-memory`."""

from flash_train.cli.profile_memory import main

if __name__ == "__main__":
    main()

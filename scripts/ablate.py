"""`python scripts/ablate.py 'sweep.seq_len=[1024,4096]'` from a checkout; installed, `flash-train-ablate`."""

from flash_train.cli.ablate import main

if __name__ == "__main__":
    main()

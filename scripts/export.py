"""`python scripts/export.py runs/… folder`: a checkpoint in the layout that `transformers` loads."""

from flash_train.cli.export import main

if __name__ == "__main__":
    main()

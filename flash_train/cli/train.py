"""`flash-train`: trains a model as its configuration says, or with `-m` several models one after another."""

from flash_train.cli.run.command import train_command


def main() -> None:
    """The console script."""
    train_command()


if __name__ == "__main__":
    main()

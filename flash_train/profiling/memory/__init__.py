"""The memory of a training step: predicted, recorded, and reported."""

"""What the predicted memory decides: whether a run may start, and the settings that its configuration leaves open."""

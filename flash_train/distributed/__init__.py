"""Training on several GPUs: who holds which weights and which rows."""

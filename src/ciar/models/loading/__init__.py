"""Foreign checkpoints: what a file is, and its tensors under this project's names."""

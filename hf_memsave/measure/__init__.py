"""What a training step costs in memory, measured and estimated."""

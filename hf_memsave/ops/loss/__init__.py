"""A language model's head and loss, a few rows at a time."""

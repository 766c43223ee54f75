"""Column-row sampling: which rows of a matrix product to draw, and what predicts their size."""

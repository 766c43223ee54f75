"""Linears and products whose gradients are made from samples of tokens; one op a file."""

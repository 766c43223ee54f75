"""Activations and norms whose backward is approximate; one op a file."""

"""The configuration that a user asks for: its fields, files, layers, sizes and sampling."""

"""What a user asks for: `MemSaveConfig`, its files, layers, sizes and sampling."""

"""Text data and tokenizers without a hub."""

"""Tables of stock classes, by name: what is approximated, sampled, fused, run again or left to stock by module."""

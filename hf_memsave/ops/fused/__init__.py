"""Ops that run as one Triton kernel each way where stock takes many: norms, activations, gated MLPs."""

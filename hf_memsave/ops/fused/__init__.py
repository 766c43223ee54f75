"""Ops that run as one Triton kernel each way where stock takes many; and linears whose conversions are shared."""

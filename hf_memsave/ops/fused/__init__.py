"""Ops that run as one Triton kernel each way where stock takes many; and linears whose conversions are shared.

They are mathematically exact, but not bit for bit stock's: all is computed in fp32 and rounded once. Masks have stock's
distribution (p in steps of 2⁻¹⁶), from a seed that the model's generator gives. Gradients of gradients are refused.
"""

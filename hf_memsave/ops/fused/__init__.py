"""Ops that run as one Triton kernel each way where stock takes many; and linears whose conversions are shared.

They are exact as mathematics, and have not stock's bits: all is computed in fp32 and rounded once. Masks are of stock's
distribution (p in steps of 2⁻¹⁶), from a seed that the model's generator gives. Gradients of gradients are refused.
"""

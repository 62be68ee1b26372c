"""Stands in for flash-attn, which OpenRLHF imports for ring attention and sequence packing alone."""

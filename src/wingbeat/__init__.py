"""Wingbeat: EAGLE-3 speculative decoding that never costs throughput."""

__version__ = "0.1.0"

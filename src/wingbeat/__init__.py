"""Wingbeat: EAGLE-3 speculative decoding that never costs throughput."""

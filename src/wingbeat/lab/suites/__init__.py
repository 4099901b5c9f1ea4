"""Prompt suites: ordered prompts with an identity (version and hash) and a provenance."""

from wingbeat.lab.suites.load import SHIPPED, Prompt, Suite, load_suite

__all__ = ["SHIPPED", "Prompt", "Suite", "load_suite"]

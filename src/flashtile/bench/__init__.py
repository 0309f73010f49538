"""Benchmarks: cases x providers, one runner; no speed is printed for a provider whose result is wrong."""

"""Benchmarks: ``python -m bench.attention`` (peers), ``python -m bench.sweep`` (rows)."""

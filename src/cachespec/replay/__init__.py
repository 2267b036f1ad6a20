"""Recorded traffic through the live caching policies against simulated vendors: what each policy would have cost."""

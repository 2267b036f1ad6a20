"""Runtimes: what evaluates tokens. `base` is the contract, one file per library implements it."""

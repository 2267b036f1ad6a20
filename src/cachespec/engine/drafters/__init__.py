"""Drafters: what proposes tokens. `base` holds the contract, `contract` its test."""

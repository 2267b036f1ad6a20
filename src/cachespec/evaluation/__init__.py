"""What a slice of recorded traffic says about a backend: speculation, prefix sharing, what policies would have cost."""

"""Test vectors for federated algorithms. README.md describes the format. Needs NumPy only."""

"""Handwritten digits, trained with PyTorch on Flower."""

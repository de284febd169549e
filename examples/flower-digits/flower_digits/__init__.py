"""Handwritten digits, trained by fedda's algorithms on Flower."""

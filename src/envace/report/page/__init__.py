"""Runs as one HTML file: curves, differing settings, and every trajectory. Opens from disk, without a network."""

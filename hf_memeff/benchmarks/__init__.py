"""Measured comparisons: what is measured, how, the results as JSON, and their rendering into README."""

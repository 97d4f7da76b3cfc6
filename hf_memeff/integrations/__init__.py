"""Plug-ins for training loops."""

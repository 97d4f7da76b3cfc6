"""The engine: runs a decoder block keeping its input alone, and re-runs it piece by piece in backward."""

"""The memory tables of the paper on MeSP (arXiv 2602.13069), measured with this package's meter."""

"""AnchorAttention: exact tiling, stripe selection, backends; see README.md in this folder for the symbols."""

"""Ready-made runs: a typed set of choices in, one training run, a result out."""

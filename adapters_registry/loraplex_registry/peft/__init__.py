"""The one rule set about adapter files: registry, engine and command line judge an adapter here and nowhere else."""

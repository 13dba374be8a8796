"""Memory of bases, adapters and cards before anything is bought: pure arithmetic over a model's config."""

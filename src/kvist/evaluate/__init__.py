"""How much the cache's format changes what a model predicts: divergence from the reference, agreement, perplexity."""

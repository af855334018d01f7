"""How much the cache's format changes what a model predicts: divergence from an exact cache, and perplexity."""

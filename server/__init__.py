"""HTTP in front of the engine: keys, limits, the contract. Knows nothing of GPUs."""

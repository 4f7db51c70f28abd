"""HTTP in front of the engine: keys, limits, the API's contract. Knows nothing of GPUs."""

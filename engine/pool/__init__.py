"""The life of models: loading, memory, eviction, and the leases that requests have on them."""

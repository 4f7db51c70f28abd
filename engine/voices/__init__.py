"""Which voices there are, read from the metadata of the models that speak. No torch, no process."""

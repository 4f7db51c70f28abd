"""Sound in requests: decoded in a process of its own, without its silence, in pieces that a model can hear."""

"""Does not even import."""

raise ImportError("libcudart.so.13: cannot open shared object file")

"""A model in a child process: parent.py is the server's half, child.py the other, service.py what a model must be."""

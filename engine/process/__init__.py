"""A model in a child process: parent.py is the server's half, child.py the other, protocol.py their messages."""

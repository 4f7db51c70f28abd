"""File batches: their files on the disk, and what runs them, line by line, across restarts of the server.

Knows nothing of HTTP. `server/store/batches.py` has the rows; the app passes in the endpoints and how a line is
answered.
"""

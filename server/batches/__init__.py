"""File batches: what lies on the disk for them, and what runs them, line by line, however often the server ends.

Knows nothing of HTTP. Rows are `server/store/batches.py`'s; how one line is answered, and which endpoints there are, is
handed in by the app.
"""

"""The page that a browser gets: its files, as they are written, and signing in."""

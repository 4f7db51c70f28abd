"""What each endpoint accepts and returns, in files of the same names as the routes."""

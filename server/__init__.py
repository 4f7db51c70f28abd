"""HTTP in front of the engine: keys, limits, the API's contract; and the command line."""

"""`hearth doctor`: the command, and what it looks at."""

"""Pictures that requests bring."""

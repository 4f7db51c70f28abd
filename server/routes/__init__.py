"""One file per part of the API. Routes do not import each other and hold no `try`."""

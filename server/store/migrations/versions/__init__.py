"""One file per change of the schema, in order. A file that was released is never edited."""

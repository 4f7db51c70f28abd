"""The demo voices: nine speakers of five languages that sing one tone per letter. See recipe.py."""

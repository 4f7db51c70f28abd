"""The demo image model: a tiny Z-Image that paints one shape in one colour, as the prompt says. See recipe.py."""

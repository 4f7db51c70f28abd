"""Model folders beside the demos: downloaded or carried here, verified, listed, safe to load.

Nothing here loads a model, and nothing asks a hub at run time. `huggingface_hub` is imported when something is
downloaded.
"""

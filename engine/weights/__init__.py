"""Model folders that are not the demo's: downloaded or carried here, verified, known again later, safe to load.

Nothing here loads a model, and nothing at run time asks a hub. `huggingface_hub` is imported when something is
downloaded.
"""

"""Model folders that were fetched: from a model hub or from another machine, verified, and known again later.

Nothing here loads a model, and nothing at run time asks a hub: what may be loaded is engine/weights.py's and
engine/images/folder.py's. `huggingface_hub` is imported when something is fetched.
"""

from engine.hub.errors import WeightsError
from engine.hub.manifest import MANIFEST, Manifest, ManifestFile, is_complete, read_manifest

__all__ = ["MANIFEST", "Manifest", "ManifestFile", "WeightsError", "is_complete", "read_manifest"]

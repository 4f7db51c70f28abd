"""Whether the weights of the demo models fit their recipes, for tests. Holds no tests."""

import json
from pathlib import Path

from demo_models.build import MANIFEST, RECIPES, manifest

from engine.demo import WEIGHTS

AGAIN = "Run scripts/build-demo-models."


def problems(name: str, recipes: Path = RECIPES, weights: Path = WEIGHTS) -> list[str]:
    """Return what does not fit together, in sentences; empty when the weights are the ones that this recipe made."""
    stored = json.loads((weights / name / MANIFEST).read_text(encoding="utf-8"))
    made, known = manifest(name, recipes, weights / name), stored["files"]
    found = []
    if stored["recipe_sha256"] != made["recipe_sha256"]:
        found.append(f"The recipe of {name} changed after its weights were made. {AGAIN}")
    found += [f"{name}/{file} is missing. {AGAIN}" for file in sorted(known.keys() - made["files"].keys())]
    found += [
        f"{name}/{file} was altered after it was made, or does not belong to the model. {AGAIN}"
        for file, sha256 in made["files"].items()
        if known.get(file) != sha256
    ]
    return found

"""The folders of the demo models: small ones, trained by this project, so that everything runs at once.

scripts/demo_models has their recipes, and what they answer.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


def weights_dir(name: str) -> Path:
    """The folder of a demo model, in the layout of transformers or of diffusers; of the voices, one per language."""
    return WEIGHTS / name


def demo_names() -> list[str]:
    files = ("config.json", "model_index.json", "*/voices.yaml")
    return sorted({path.relative_to(WEIGHTS).parts[0] for file in files for path in WEIGHTS.glob(f"[!.]*/{file}")})

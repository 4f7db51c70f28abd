"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a CPU torch. No part of Hearth's packages.

Its compiled library cannot be loaded there, and the import fails where it describes that library's operators, though
pictures are resized by torch alone. scripts/setup copies this file into .venv, where each Python runs it at its start;
an operator that is called raises as torchvision says. A torchvision built for the CPU is left as it is.
"""

import sys
from importlib.machinery import ModuleSpec

DESCRIPTIONS = "torchvision._meta_registrations"


class WithoutOperators:
    """Finds an empty module for the descriptions of operators that are not there, and nothing else."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        has_operators = getattr(sys.modules.get("torchvision.extension"), "_has_ops", None)
        if name != DESCRIPTIONS or has_operators is None or has_operators():
            return None
        return ModuleSpec(name, WithoutOperators)  # type: ignore[arg-type]  # a loader by its methods

    @staticmethod
    def create_module(_spec: ModuleSpec) -> None:
        """Leave it to Python."""

    @staticmethod
    def exec_module(_module: object) -> None:
        """Leave it empty."""


sys.meta_path.insert(0, WithoutOperators)  # type: ignore[arg-type]  # likewise

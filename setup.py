"""What pyproject.toml cannot say: a wheel carries torchvision_for_cpu, with the .pth file that runs it at each start.

scripts/setup copies the same two files into .venv, since an editable install has no place for them.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP = "torchvision_for_cpu"


class WithStartup(build_py):
    """Puts both files beside the packages, which is where Python looks for them."""

    def run(self) -> None:
        """Copy them once the packages are there."""
        super().run()
        if not self.editable_mode:
            self.copy_file(f"scripts/install/{STARTUP}.py", self.build_lib)
            Path(self.build_lib, f"{STARTUP}.pth").write_text(f"import {STARTUP}\n", encoding="utf-8")


setup(cmdclass={"build_py": WithStartup})

"""Puts a copy of `conf/` into the package when a wheel is built; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has conf/ itself
            copy = Path(self.build_lib) / "sidestream" / "conf"
            shutil.rmtree(copy, ignore_errors=True)  # an option that is gone may be left of an earlier build
            shutil.copytree("conf", copy)


setup(cmdclass={"build_py": WithConfigs})

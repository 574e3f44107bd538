"""The wheel's tag: any Python 3, no ABI, and the oldest glibc that the engine runs on.

setuptools would tag the wheel for this interpreter alone, since it carries a binary; ours is a program beside
the scripts, which no interpreter loads. The manylinux number comes from the binary: the newest symbol version
that it asks of glibc (a `GLIBC_2.N` string in its dynamic section). Everything else is in pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


def manylinux_tag(engine: bytes, platform: str) -> str:
    """`manylinux_2_34_x86_64` for `linux_x86_64` and an engine that needs glibc 2.34.

    An engine that needs no glibc (musl) keeps the plain linux tag.
    """
    minors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)", engine)]
    architecture = platform.removeprefix("linux_")
    if not minors or architecture == platform:
        return platform
    return f"manylinux_2_{max(minors)}_{architecture}"


class EngineWheel(bdist_wheel):
    """`bdist_wheel` with the tag above."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        if platform == "any":  # an editable install: no engine inside
            return "py3", "none", platform
        scripts = Path(self.get_finalized_command("build_scripts").build_dir)  # type: ignore[attr-defined]  # typed as Command
        engine = scripts / "headraced"
        if not engine.is_file():
            sys.exit(f"{engine} was not built: a wheel without its engine is of no use")
        return "py3", "none", manylinux_tag(engine.read_bytes(), platform)


setup(cmdclass={"bdist_wheel": EngineWheel})

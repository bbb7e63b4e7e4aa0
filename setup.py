"""What `pip install -e .` needs beside pyproject.toml: requirements.txt, cut where its development part begins."""

from pathlib import Path

from setuptools import setup


def listed(part: str) -> list[str]:
    """Return the requirements among the lines of a part."""
    lines = (line.partition("#")[0].strip() for line in part.splitlines())
    return [line for line in lines if line]


run, _, develop = (
    Path(__file__)
    .with_name("requirements.txt")
    .read_text(encoding="utf-8")
    .partition("# Development")
)
# The first line of what follows is the rest of that heading.
setup(
    install_requires=listed(run),
    extras_require={"dev": listed(develop.partition("\n")[2])},
)

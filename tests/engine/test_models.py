"""Finding a model's file: every wrong way to name one is a typed error that says what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachespec.engine.models import check_model, find_model, shipped_models
from cachespec.errors import ConfigError, MissingDependencyError, NotFoundError


def package(folder: Path, name: str, *files: str) -> None:
    """An installed distribution whose module must not be imported."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    module = folder / name.replace("-", "_")
    module.mkdir()
    (module / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    for file in files:
        (module / file).write_bytes(b"GGUF")
    (info / "RECORD").write_text("".join(f"{module.name}/{file},,\n" for file in ("__init__.py", *files)))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/model.gguf") == file
    (tmp_path / "noextension").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert find_model("noextension") == Path("noextension")


def test_a_shipped_model_is_found_and_not_imported(site: Path) -> None:
    package(site, "llm-pocket", "pocket.Q4.gguf", "notes.txt")
    assert find_model("pocket") == site / "llm_pocket" / "pocket.Q4.gguf"
    assert find_model("llm-pocket") == site / "llm_pocket" / "pocket.Q4.gguf"
    assert "pocket" in shipped_models()
    assert "llm_pocket" not in sys.modules


def test_a_package_with_several_files_asks_which(site: Path) -> None:
    package(site, "llm-pair", "a.gguf", "b.gguf")
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        find_model("pair")
    assert "pair" not in shipped_models()


def test_a_package_whose_file_is_gone_ships_nothing(site: Path) -> None:
    package(site, "llm-gone", "gone.gguf")
    (site / "llm_gone" / "gone.gguf").unlink()
    with pytest.raises(ConfigError, match="neither a file nor a model"):
        find_model("gone")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.gguf", "no such file"),
        ("some/folder/model", "no such file"),
        ("nosuchmodel", "neither a file nor a model"),
        ("hf:org", "hf:org/repo"),
        ("hf:/repo/x.gguf", "hf:org/repo"),
        ("", "neither a file nor a model"),
        ("!?", "neither a file nor a model"),
    ],
)
def test_names_that_mean_nothing(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_model(name)
    assert caught.value.key == "model"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("reference", ["hf:org/repo", "hf:org/repo/model.gguf"])
def test_the_hub_out_of_reach(reference: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        "from cachespec.engine.models import find_model\nfrom cachespec.errors import ConfigError\n"
        f"try: find_model({reference!r})\nexcept ConfigError as error: print(error, error.hint)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "not in the local cache" in done.stdout
    assert "while online" in done.stdout


def hub(monkeypatch: pytest.MonkeyPatch, files: list[str], result: Path | Exception) -> list[tuple[str, str]]:
    """The hub's two calls, answered here."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, str]] = []

    class Api:
        def model_info(self, repo: str, *, timeout: float) -> SimpleNamespace:
            assert timeout <= 10, "an unreachable hub is said to be so within seconds"
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_a_hub_repository_with_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = hub(monkeypatch, ["README.md", "m.gguf"], tmp_path / "m.gguf")
    assert find_model("hf:org/repo") == tmp_path / "m.gguf"
    assert find_model("hf:org/repo/sub/other.gguf") == tmp_path / "m.gguf"
    assert asked == [("org/repo", "m.gguf"), ("org/repo", "sub/other.gguf")]


def test_a_hub_repository_with_many_files_asks_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, ["b.gguf", "a.gguf"], tmp_path)
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        find_model("hf:org/repo")


def test_a_hub_repository_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    import httpx2

    response = httpx2.Response(404, request=httpx2.Request("HEAD", "https://example.org"))
    hub(monkeypatch, [], errors.RepositoryNotFoundError("no such repository", response=response))
    with pytest.raises(NotFoundError, match="hf:org/repo"):
        find_model("hf:org/repo/m.gguf")


def test_without_the_hub_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError) as caught:
        find_model("hf:org/repo/m.gguf")
    assert caught.value.extra == "llamacpp"


def test_a_full_disk_while_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [], OSError(28, "No space left on device"))
    with pytest.raises(ConfigError, match="No space left"):
        find_model("hf:org/repo/m.gguf")


def test_a_downloaded_file_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: str(tmp_path / file))
    assert find_model("hf:org/repo/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("reference", ["hf:org/repo", "hf:org/repo/model.gguf"])
def test_an_unreachable_hub_is_asked_once(reference: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        "import time\nfrom cachespec.engine.models import find_model\nfrom cachespec.errors import ConfigError\n"
        "import huggingface_hub\nbegan = time.monotonic()\n"
        f"try: find_model({reference!r})\nexcept ConfigError as error: print(error)\nprint(time.monotonic() - began < 10)"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "cannot be downloaded" in done.stdout
    assert done.stdout.endswith("True\n")


def test_a_model_is_looked_for_without_the_hub(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    package(site, "llm-pocket", "pocket.Q4.gguf")
    check_model("hf:org/repo/m.gguf")
    check_model("pocket")
    with pytest.raises(ConfigError, match="hf:org/repo"):
        check_model("hf:org")
    with pytest.raises(ConfigError) as caught:
        check_model("pockt")
    assert caught.value.hint == "did you mean 'pocket'?"

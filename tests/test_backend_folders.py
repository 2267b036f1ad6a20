"""The folders of `backends/`: each configuration is accepted, each table says what the rows of `compatible` say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cachespec.backends._profile import Profile
from cachespec.backends.compatible import ROWS
from cachespec.config import load_config
from cachespec.config_check import check_config
from cachespec.decide import PARAMETERS

FOLDER = Path(__file__).resolve().parents[1] / "backends"
OWN = ("anthropic", "openai", "llamacpp", "torch")
FOLDERS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
SECTIONS = ["Start it", "Configure it", "What it can be told", "Its cache", "Usage and price", "What was tested"]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that a configuration here may name."""
    for key in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", *(row.key for row in ROWS.values() if row.key)):
        monkeypatch.setenv(key, "k")


def readme(name: str) -> str:
    return (FOLDER / name / "README.md").read_text(encoding="utf-8")


def test_every_backend_has_a_folder_and_a_line() -> None:
    assert set(FOLDERS) == {*OWN, *ROWS}
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\)", index, re.MULTILINE)) == set(FOLDERS)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("name", FOLDERS)
def test_its_configuration_is_accepted_and_is_about_it(name: str) -> None:
    path = FOLDER / name / "cachespec.toml"
    assert [finding.message for finding in check_config(path) if finding.level == "error"] == []
    config = load_config(path)
    (backend,), (alias,) = config.backends, config.models.values()
    assert alias == (backend,)
    spec = config.backends[backend]
    assert (spec.use, spec.options.get("server")) == ((name, None) if name in OWN else ("compatible", name))
    assert f"`[backends.{backend}]`" in readme(name)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_commented_out_is_accepted_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    text = (FOLDER / name / "cachespec.toml").read_text(encoding="utf-8")
    path = tmp_path / "cachespec.toml"
    path.write_text(re.sub(r"^# (?=\w+ *= )", "", text, flags=re.MULTILINE), encoding="utf-8")
    assert [finding.message for finding in check_config(path) if finding.level == "error"] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_its_page_has_all_parts_and_sound_commands_and_links(name: str) -> None:
    text = readme(name)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (FOLDER / name / target).exists(), target


@pytest.mark.parametrize("name", ROWS)
def test_its_table_says_what_the_row_says(name: str) -> None:
    text, profiles = readme(name), ROWS[name].profiles
    rows = re.findall(r"^\| `(?:chat|responses|messages)`.*$", text, re.MULTILINE)
    assert [row.replace(" (default)", "") for row in rows] == [line(profile) for profile in profiles]
    assert ("Images: yes." in text) is profiles[0].images
    key = ROWS[name].key
    assert key is None or f"export {key}=" in text


def line(profile: Profile) -> str:
    """The line of the table for a protocol."""
    takes = profile.parameters
    parameters = [f"`{n}`" for n in (*PARAMETERS, "max_output_tokens") if n in takes - {"response_format", "reasoning"}]
    forms = ["`json`"] * profile.json_mode + ["schema"] * profile.json_schema
    reasoning = [f"`{n}`" for n in ("effort", "budget_tokens", "summary") if n in profile.reasoning]
    cells = parameters, forms if "response_format" in takes else [], reasoning if "reasoning" in takes else []
    return f"| `{profile.api}` | {' | '.join(', '.join(cell) or 'no' for cell in cells)} |"

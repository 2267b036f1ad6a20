"""``cachespec why``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Run, document


def write(folder: Path, name: str, system: str) -> str:
    path = folder / name
    body: dict[str, Any] = {"system": system, "messages": [{"role": "user", "content": "Hi"}]}
    path.write_text(json.dumps(body))
    return str(path)


def test_table_and_document(run: Run, tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.json", "It is 10:15 now."), write(tmp_path, "b.json", "It is 10:16 now.")
    found = document(run("why", a, b, "--json"))
    assert found["divergence"] == {
        "segment": "system[0]",
        "path": "system[0]",
        "offset_chars": 10,
        "kind": "datetime",
        "before": "It is 10:15 now.",
        "after": "It is 10:16 now.",
    }
    assert found["vendor_reason"] is None
    shown = run("why", a, b)
    assert shown.exit_code == 0
    assert "system[0], character 10: datetime" in shown.stdout
    assert "advice" in shown.stdout
    assert document(run("why", a, a, "--json"))["divergence"] is None
    assert run("why", a, a).stdout.startswith("identical")
    assert document(run("why", "-", b, "--json", text=Path(a).read_text()))["divergence"]["kind"] == "datetime"


def test_bad_input(run: Run, tmp_path: Path) -> None:
    a = write(tmp_path, "a.json", "x")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for args in (("why", a, str(bad)), ("why", a, str(tmp_path / "none.json")), ("why", "-", "-"), ("why", a)):
        result = run(*args, text="{}")
        assert result.exit_code == 2, args
        assert result.stdout == ""

"""``cachespec config``: check a file, print the schema."""

from __future__ import annotations

import click

from cachespec.cli._io import console, json_option, own_plugins, write_json
from cachespec.text_source import STDIN, read_text


@click.group(name="config")
def command() -> None:
    """Check a configuration file, or print its JSON schema."""


@command.command()
@click.argument("file", type=click.Path(allow_dash=True), callback=own_plugins)
@json_option
def check(file: str, as_json: bool) -> None:
    """Everything that is wrong with FILE, with file, line and key; then what this machine lacks for it.

    Exits with 2 when `connect` would refuse the file. Warnings alone (an environment variable that is not set, a model that
    is not here) are no fault of the file.
    """
    from cachespec.config_check import check_config, check_text

    findings = check_text(read_text("-"), STDIN) if file == "-" else check_config(file)
    wrong = any(finding.level == "error" for finding in findings)
    if as_json:
        write_json({"path": file, "ok": not wrong, "findings": [finding.to_dict() for finding in findings]})
    else:
        out = console()
        for finding in findings:
            place = ":".join(str(x) for x in (finding.path or file, finding.line) if x is not None)
            hint = f" ({finding.hint})" if finding.hint else ""
            key = f"{finding.key}: " if finding.key else ""
            out.print(f"{place}: {finding.level}: {key}{finding.message}{hint}", markup=False)
        if not wrong:
            out.print(f"{file}: valid", markup=False)
    if wrong:
        raise SystemExit(2)


@command.command()
@json_option
def schema(as_json: bool) -> None:
    """The JSON schema (draft 2020-12) of the file, with the options of every installed plug-in."""
    from cachespec.schema import config_schema

    write_json(config_schema())

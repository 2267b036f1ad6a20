"""``cachespec plugins``: what is installed."""

from __future__ import annotations

import click

from cachespec.cli._io import console, json_option, write_json


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Every installed plug-in, and whether it can be loaded.

    `use = "NAME"` in a configuration names one of these, or anything importable as "module:attribute".
    """
    from cachespec.registry import plugins

    found = plugins()
    if as_json:
        write_json({"plugins": [plugin.to_dict() for plugin in found]})
        return
    from rich.table import Table

    table = Table("family", "use", "from", "loads", box=None, pad_edge=False)
    for plugin in found:
        origin = f"{plugin.distribution} {plugin.version}: {plugin.value}"
        table.add_row(plugin.family, plugin.name, origin, plugin.problem or "yes")
    console().print(table)

"""``cachespec why``: where one request stopped sharing another's prefix."""

from __future__ import annotations

import click

from cachespec.cli._io import json_option, read_request, write_json


@click.command()
@click.argument("a", type=click.Path(allow_dash=True))
@click.argument("b", type=click.Path(allow_dash=True))
@json_option
def command(a: str, b: str, as_json: bool) -> None:
    """Where one request stopped sharing another's prefix, and why.

    A is the earlier request, B the later one, both as for `complete`; one of them may be - for stdin. Tokens are estimates.
    """
    from cachespec.why import why

    if a == b == "-":
        raise click.UsageError("stdin can hold one request, not both")
    found = why(read_request(a, None), read_request(b, None))
    if as_json:
        write_json(found.to_dict())
        return
    divergence = found.divergence
    if divergence is None:
        click.echo(f"identical: about {found.shared_tokens} tokens")
        return
    if divergence.kind == "appended":
        click.echo(f"B extends A from {divergence.segment} on: all of about {found.shared_tokens} tokens can be read again")
        return
    where = "" if divergence.segment == "params" else f", character {divergence.offset_chars}"
    click.echo(f"{divergence.segment}{where}: {divergence.kind}")
    if divergence.path != divergence.segment:
        click.echo(f"  at      {divergence.path}")
    click.echo(f"  A has   {divergence.before!r}")
    click.echo(f"  B has   {divergence.after!r}")
    click.echo(f"  shared  about {found.shared_tokens} tokens; lost about {found.lost_tokens}")
    click.echo(f"  advice  {divergence.advice}")

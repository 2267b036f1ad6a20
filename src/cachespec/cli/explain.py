"""``cachespec explain``: the decision for a request, and the bytes that would be sent."""

from __future__ import annotations

import click

from cachespec.cli._io import config_option, connection, json_option, read_object, write_json


@click.command()
@click.argument("request", type=click.Path(allow_dash=True))
@config_option
@click.option("--wire", is_flag=True, help="Add the exact body that would be sent.")
@json_option
def command(request: str, config: str | None, wire: bool, as_json: bool) -> None:
    """Which backend a request would go to and why; sends nothing.

    REQUEST is as for `complete`. Secrets are never shown. A local backend sends nothing anywhere: its wire is null.
    """
    import anyio

    from cachespec.bodies import request_from_body

    if request == config == "-":
        raise click.UsageError("stdin can hold the request or the configuration, not both")
    parsed = request_from_body(read_object(request))

    async def run() -> None:
        async with connection(config) as client:
            await client.refresh(parsed)
            verdict = client.plan_request(parsed)
            sent = client.wire(verdict) if wire else None
        if as_json:
            document = verdict.decision.to_dict()
            if wire:
                document["wire"] = None if sent is None else {"url": sent.url, "body": sent.body}
            write_json(document)
            return
        click.echo(verdict.decision.explain())
        for warning in verdict.warnings:
            click.echo(f"warning: {warning}", err=True)
        if sent is not None:
            click.echo(f"POST {sent.url}\n{sent.body}")
        elif wire:
            click.echo("nothing goes over the wire")

    anyio.run(run)

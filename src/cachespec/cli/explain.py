"""``cachespec explain``: the decision for a request, and the bytes that would be sent."""

from __future__ import annotations

import click

from cachespec.cli._io import config_option, connection, json_option, read_request, request_options, write_json


@click.command()
@request_options
@config_option
@click.option("--wire", is_flag=True, help="Add the exact body that would be sent.")
@json_option
def command(
    request: str,
    config: str | None,
    tenant: str | None,
    session_id: str | None,
    tags: tuple[str, ...],
    wire: bool,
    as_json: bool,
) -> None:
    """Which backend a request would go to and why; sends nothing.

    REQUEST is as for `complete`. Secrets are never shown. A local backend sends nothing anywhere: its wire is null. Exits
    with 1 when nobody can take the request.
    """
    import anyio

    parsed = read_request(request, config, tenant=tenant, session_id=session_id, tags=tags)

    async def run() -> bool:
        async with connection(config) as client:
            await client.refresh(parsed)
            verdict = client.plan_request(parsed)
            sent = client.wire(verdict) if wire else None
        if as_json:
            document = verdict.decision.to_dict()
            if wire:
                document["wire"] = None if sent is None else {"url": sent.url, "body": sent.body}
            write_json(document)
            return verdict.decision.chosen is not None
        click.echo(verdict.decision.explain())
        for warning in verdict.warnings:
            click.echo(f"warning: {warning}", err=True)
        if sent is not None:
            click.echo(f"POST {sent.url}\n{sent.body}")
        elif wire:
            click.echo("nothing goes over the wire")
        return verdict.decision.chosen is not None

    if not anyio.run(run):
        raise SystemExit(1)

"""``cachespec complete``: answer one request."""

from __future__ import annotations

import click

from cachespec.cli._io import (
    config_option,
    connection,
    echo_text,
    json_option,
    read_request,
    request_options,
    usage_line,
    write_json,
)


@click.command()
@request_options
@config_option
@json_option
def command(
    request: str, config: str | None, tenant: str | None, session_id: str | None, tags: tuple[str, ...], as_json: bool
) -> None:
    """Answer one request.

    REQUEST is a JSON file (or - for stdin) with the keyword arguments of client.stream, or a Chat Completions, Responses
    or Messages body. The answer streams to stdout; what it took is told on stderr.
    """
    import anyio

    parsed = read_request(request, config, tenant=tenant, session_id=session_id, tags=tags)

    async def run() -> None:
        async with connection(config) as client, client.stream_request(parsed) as stream:
            if not as_json:
                await echo_text(stream)
            done = await stream.get_final_completion()
        if as_json:
            write_json(done.to_dict())
            return
        for call in done.tool_calls:
            click.echo(f"{call.name}({call.arguments})")
        click.echo(usage_line(done), err=True)
        for warning in done.warnings:
            click.echo(f"warning: {warning}", err=True)

    anyio.run(run)

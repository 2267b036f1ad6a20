"""``cachespec complete``: answer one request."""

from __future__ import annotations

import click

from cachespec.cli._io import config_option, connection, json_option, read_object, usage_line, write_json


@click.command()
@click.argument("request", type=click.Path(allow_dash=True))
@config_option
@json_option
def command(request: str, config: str | None, as_json: bool) -> None:
    """Answer one request.

    REQUEST is a JSON file (or - for stdin) with the keyword arguments of client.stream, or a Chat Completions, Responses
    or Messages body. The answer streams to stdout; what it took is told on stderr.
    """
    import anyio

    from cachespec.bodies import request_from_body

    if request == config == "-":
        raise click.UsageError("stdin can hold the request or the configuration, not both")
    parsed = request_from_body(read_object(request))

    async def run() -> None:
        async with connection(config) as client, client.stream_request(parsed) as stream:
            if not as_json:
                async for text in stream.text_stream:
                    click.echo(text, nl=False)
            done = await stream.get_final_completion()
        if as_json:
            write_json(done.to_dict())
            return
        click.echo()
        for call in done.tool_calls:
            click.echo(f"{call.name}({call.arguments})")
        click.echo(usage_line(done), err=True)
        for warning in done.warnings:
            click.echo(f"warning: {warning}", err=True)

    anyio.run(run)

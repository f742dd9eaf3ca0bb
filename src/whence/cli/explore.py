"""`whence explore [MODEL]`: methods, a model and results in a browser."""

import socket
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.errors import one_line_errors


def explore(
    model: Annotated[
        str | None, typer.Argument(help="A folder or a name on the hub, ready to be inspected.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder whose results to browse.")] = Path(
        "results"
    ),
    root: Annotated[
        Path, typer.Option(help="Only models inside of this folder can be opened from the page.")
    ] = Path(),
    method: Annotated[
        list[str],
        typer.Option(help="A method of your own, my_module:Wave, to be imported; may be repeated."),
    ] = [],  # noqa: B006  typer copies it
    host: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="The port; the first free one from 7860 on unless given.", min=1),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
) -> None:
    """Move the parameters of any method, look into a model, browse results: in a browser.

    The page is served to this machine alone unless --host says otherwise. Ctrl-C ends it.
    """
    with one_line_errors("app"):
        if not root.is_dir():
            raise ValueError(f"--root: there is no folder {root}.")
        _check_address(host, port)
        from whence.app.server import serve
        from whence.app.settings import Settings

        settings = Settings(root.resolve(), results, model or "", tuple(method))
        serve(settings, host=host, port=port, browse=browse, say=typer.echo)


def _check_address(host: str, port: int | None) -> None:
    """Refuse what cannot be bound, before a server tries a hundred ports; it knows IPv4 alone."""
    if port is not None and port > 65535:
        raise ValueError(f"--port must be at most 65535, got {port}.")
    where = host if port is None else f"{host}:{port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port or 0))  # 0 is any port
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"cannot serve on {where}: {reason}.") from None

"""Starts the page: workers first, so that they import torch while the server imports Gradio."""

import gc
import time
from collections.abc import Callable

from whence.app.settings import Settings
from whence.app.worker import Worker


def serve(
    settings: Settings, *, host: str, port: int | None, browse: bool, say: Callable[[str], None]
) -> None:
    """Serve until it is interrupted."""
    gc.disable()  # what a start makes stays: to look for garbage in it takes a fifth of the time
    quick, long = Worker(settings), Worker(settings)
    quick.start()
    try:
        from whence.app.page import look, make_page

        page = make_page(quick, long)
        _, url, _ = page.launch(
            server_name=host,
            server_port=port,
            inbrowser=browse,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,
            footer_links=[],
            **look(),
        )
        gc.freeze()
        gc.enable()
        say(f"whence explore: {url} (Ctrl-C ends it)")
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
    finally:
        quick.stop()
        long.stop()

"""`whence explore`: methods, models and results in a browser.

Two kinds of process. The server (`server`, `page`) has Gradio and no torch. What it shows is drawn
in worker processes (`worker`, `explorer`), which have torch and no Gradio. So both are imported at
the same time, and nothing that a computation does can stop the page.
"""

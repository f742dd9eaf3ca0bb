"""How many training runs side by side make the most of one GPU.

    python benchmarks/lm_at_once.py [--at-once 1,2,4,6,8] [--method tisa:kernels=5] [--seconds 3]

As many processes as the largest number, each with the model of lm_gpu.py; the first k of them train
at the same time. Prints tokens a second of all k together: lm_gpu.py's --at-once should be the
smallest number beyond which little is won.
"""

import argparse
import contextlib
import multiprocessing
import queue
import time
from typing import Any


def worker(place: int, numbers: list[int], options: dict[str, Any], both: Any, out: Any) -> None:
    """In round i the first numbers[i] processes train for some seconds; all meet before it."""
    import torch

    from lm_clock import waited
    from lm_contender import Contender, random_ids

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contender = Contender(options["method"], options["shape"], options["n"], device)
    ids = random_ids(options["n"], options["tokens"], device)
    for _ in range(3):
        contender.step(ids)
    waited(device)
    for number in numbers:
        both.wait(timeout=120)
        steps, start = 0, time.perf_counter()
        while place < number and time.perf_counter() - start < options["seconds"]:
            for _ in range(2):
                contender.step(ids)
            steps, stop = steps + 2, waited(device)
        if place < number:
            out.put((number, steps * ids.numel() / (stop - start)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", default="1,2,4,6,8")
    parser.add_argument("--method", default="tisa:kernels=5")
    parser.add_argument("--seconds", type=float, default=3.0, help="a number")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args(arguments)
    numbers = [int(k) for k in options.at_once.split(",")]
    given = {
        "method": options.method,
        "n": options.n,
        "tokens": options.batch * options.n,
        "seconds": options.seconds,
        "shape": {
            "hidden_size": options.width,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
        },
    }
    context = multiprocessing.get_context("spawn")
    both, out = context.Barrier(max(numbers)), context.Queue()
    processes = [
        context.Process(target=worker, args=(place, numbers, given, both, out), daemon=True)
        for place in range(max(numbers))
    ]
    for process in processes:
        process.start()
    found = []
    with contextlib.suppress(queue.Empty):  # where a process has died, what there is
        while len(found) < sum(numbers):
            found.append(out.get(timeout=90))
    for process in processes:
        process.join(5)
        process.kill()
    for number in numbers:
        together = sum(speed for k, speed in found if k == number)
        print(f"{number} at once: {together / 1e3:,.0f}k tokens/s together", flush=True)


if __name__ == "__main__":
    main()

"""llama.cpp's own server (through xllamacpp) on a loopback port, until its standard input ends.

    python benchmarks/peers/llamacpp_server.py MODEL.gguf PORT THREADS SLOTS CONTEXT

Prints ``ready`` when it answers. CONTEXT is that of one slot.
"""

from __future__ import annotations

import sys


def main(model: str, port: int, threads: int, slots: int, context: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = slots, slots * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

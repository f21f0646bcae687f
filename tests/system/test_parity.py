"""What a script sees, and how it ends, is what the interpreter itself would make of it, byte for byte."""

# ruff: noqa: E501 - scripts, not lines of ours

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from system.rig import Run, no_torch, script

SCRIPTS = {
    # --- ends ---
    "exit with nothing": "import sys\nsys.exit()",
    "exit with text": "import sys\nsys.exit('bad thing \u2713')",
    "exit with a list": "import sys\nsys.exit([1, 2])",
    "exit with 256": "import sys\nsys.exit(256)",
    "exit with -1": "import sys\nsys.exit(-1)",
    "exit with 3 in a hurry": "import os\nos._exit(3)",
    "a subclass of SystemExit": "class Stop(SystemExit): pass\nraise Stop('sub')",
    "an interrupt of its own": "raise KeyboardInterrupt",
    "an exception": "def f():\n    raise ValueError('x')\nf()",
    "a chain of exceptions": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise KeyError('k') from error",
    "a group of exceptions": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "an exception that can't be shown": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Odd"
    ),
    "an exception whose text is none": "class Odd(Exception):\n    def __str__(self): return 5\nraise Odd",
    "an abort": "import os\nos.abort()",
    "a hook": "import sys\nsys.excepthook = lambda kind, error, tb: print('hook', error)\nraise ValueError(3)",
    "a hook that raises": (
        "import sys\ndef hook(kind, error, tb):\n    raise KeyError('in hook')\n"
        "sys.excepthook = hook\nraise ValueError(3)"
    ),
    "a hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\nraise ValueError(3)",
    "no hook": "import sys\nsys.excepthook = None\nraise ValueError(3)",
    "a deleted hook": "import sys\ndel sys.excepthook\nraise ValueError(3)",
    "atexit that raises": (
        "import atexit\nclass Odd:\n    def __call__(self): raise ValueError('late')\n"
        "    def __repr__(self): return 'odd'\natexit.register(Odd())\nprint('hi')"
    ),
    "atexit that ends it": "import atexit, os\natexit.register(os._exit, 4)\nprint('hi')",
    "threads that run on": (
        "import threading, time\ndef late():\n    time.sleep(0.2)\n    print('late')\n"
        "threading.Thread(target=late).start()\nprint('main is done')"
    ),
    "threads that run on after an exception": (
        "import threading, time\ndef late():\n    time.sleep(0.2)\n    print('late')\n"
        "threading.Thread(target=late).start()\nraise ValueError('main')"
    ),
    "a thread that raises": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()\nprint('on')"
    ),
    # --- streams ---
    "nothing at all": "",
    "no newline at the end": "import sys\nsys.stdout.write('half a line')",
    "a closed stdout": "import sys\nprint('a')\nsys.stdout.close()\nprint('b')",
    "a closed descriptor 1": "import os\nprint('a')\nos.close(1)\nprint('b')",
    "a closed descriptor 2": "import os\nos.close(2)\nraise ValueError(1)",
    "no stderr": "import sys\nsys.stderr = None\nraise ValueError(1)",
    "bytes that are no text": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 9)",
    # --- children ---
    "a child that exits otherwise": (
        "import os, sys\nif os.fork() == 0:\n    print('child')\n    sys.exit(5)\nprint(os.wait()[1])"
    ),
    "a child that raises": (
        "import os\nif os.fork() == 0:\n    raise ValueError('in the child')\nprint(os.wait()[1])"
    ),
    "a child that runs off the end": (
        "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    print(os.wait()[1])"
    ),
    # --- what it finds ---
    "globals": (
        '"""doc"""\nprint(sorted(globals()), __doc__, __name__, __file__, __spec__, __package__, __cached__)\n'
        "print(type(__loader__).__name__, __loader__.name, __loader__.path, __annotations__, __builtins__)"
    ),
    "sys": (
        "import sys\nprint(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.warnoptions)\n"
        "print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.line_buffering, sys.stdout.write_through)\n"
        "print(sys.getrecursionlimit(), sys.gettrace(), sys.getswitchinterval(), sys.excepthook)"
    ),
    "signals": (
        "import signal\nprint([(int(n), signal.getsignal(n)) for n in sorted(signal.valid_signals())])\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL))"
    ),
    "limits": (
        "import os, resource\n"
        "print([(n, resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n[:7] == 'RLIMIT_'])\n"
        "print(os.getcwd(), os.umask(0), os.nice(0), os.sched_getaffinity(0), os.getgroups())"
    ),
    "descriptors": "import os\nprint(sorted(int(fd) for fd in os.listdir('/proc/self/fd') if int(fd) < 1000))",
    "threads and locale": (
        "import locale, sys, threading, os\nprint(threading.active_count(), locale.setlocale(locale.LC_ALL))\n"
        "print(threading.get_native_id() == os.getpid(), sys.getfilesystemencoding(), os.listdir('/proc/self/task')"
        " == [str(os.getpid())])"
    ),
    "warnings": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
}  # fmt: skip


@pytest.mark.parametrize("source", [pytest.param(text, id=name) for name, text in SCRIPTS.items()])
def test_as_the_interpreter_does(source: str, run: Run, tmp_path: Path) -> None:
    path = script(tmp_path, source, name="case.py")
    plain = subprocess.run(
        [sys.executable, "-u", path, "a", "b c"],
        env={**os.environ, **no_torch(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    done, job = run("--max-restarts", 0, path, "a", "b c")
    logs = job.run_dir / "logs" / "0"
    written = [
        file.read_bytes() if (file := logs / f"0.{which}").exists() else b"" for which in ("out", "err")
    ]
    assert written == [plain.stdout, plain.stderr]
    assert done.returncode == (plain.returncode if plain.returncode >= 0 else 128 - plain.returncode)


def test_what_differs_on_purpose(run: Run, tmp_path: Path) -> None:
    """faulthandler is on, as stacks are evidence; and each rank leads a session, as under torchrun."""
    path = script(
        tmp_path,
        """
        import faulthandler, os
        assert faulthandler.is_enabled()
        assert os.getsid(0) == os.getpid()
        """,
    )
    done, _ = run(path)
    assert done.returncode == 0, done.stderr

"""Signals start out as a fresh interpreter has them, and the script's own handlers work."""

import faulthandler
import os
import signal
import sys
import threading
import time

for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM"):
    handler = signal.getsignal(getattr(signal, name))
    print(name, getattr(handler, "__name__", None) or handler.name)
print("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
print("main thread is the process's first:", threading.get_native_id() == os.getpid())

caught = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
    signal.signal(number, lambda number, frame: caught.append(signal.Signals(number).name))
    os.kill(os.getpid(), number)
signal.setitimer(signal.ITIMER_REAL, 0.01)
deadline = time.monotonic() + 30
while caught.count("SIGALRM") < 2 and time.monotonic() < deadline:
    time.sleep(0.005)
print(caught)

faulthandler.enable()
faulthandler.dump_traceback_later(300, exit=True)
faulthandler.cancel_dump_traceback_later()
faulthandler.register(signal.SIGUSR2, file=sys.stderr, chain=False)
faulthandler.unregister(signal.SIGUSR2)
print("faulthandler is the script's to use:", faulthandler.is_enabled())

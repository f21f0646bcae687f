"""The end of a script: threads finish, exit handlers run in reverse, buffers are flushed."""

import atexit
import concurrent.futures
import sys
import threading
import time
import weakref


class Thing:
    pass


def late():
    pending.result()
    print("thread done")


thing = Thing()
# Before any other handler, so that it runs after them all, whoever else has made finalizers before.
weakref.finalize(thing, sys.stdout.write, "no newline at the end")
atexit.register(print, "registered first")
atexit.register(print, "registered second")
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(time.sleep, 0.2)
pending = pool.submit(print, "pool done")
threading.Thread(target=late).start()
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
print("main done")

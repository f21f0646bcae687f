"""From the bytes of one stream to what a console shows: lines with a prefix, or the bytes as they are.

With one rank in the world the console gets the bytes as they come, so progress bars work. With several, each
line gets the rank's prefix; a carriage return ends a line too, at most ``UPDATES_PER_S`` a second are shown,
and the last before a line feed always is. A line that is not complete is shown after ``PARTIAL_S`` of
silence. Lines longer than ``MAX_LINE_BYTES`` are split.

Python sees blocks here, not lines: a flood of short lines is prefixed by one ``bytes.replace`` a block.
"""

from __future__ import annotations

from collections.abc import Callable

from closeranks.agent.log_console import Console, Source
from closeranks.agent.log_files import LogFile
from closeranks.agent.log_protocol import Message

__all__ = ["ConsoleStream", "LineFilter", "coloured"]

MAX_LINE_BYTES = 65536
PARTIAL_S = 0.2
UPDATES_PER_S = 10
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


def coloured(prefix: bytes, rank: int) -> bytes:
    """The prefix in its rank's colour; the blanks behind it stay plain."""
    text = prefix.rstrip(b" ")
    return b"\x1b[%dm%s\x1b[0m%s" % (_COLOURS[rank % len(_COLOURS)], text, prefix[len(text) :])


class ConsoleStream:
    """One stream of one rank on its way to a console."""

    def __init__(
        self, console: Console, source: Source, *, raw: bool, rank: int, log: LogFile,
        report: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self.console = console
        self.source = source
        self._raw = raw
        self._rank = rank
        self._log = log
        self._report = report
        self._carry = b""  # the beginning of a line whose end has not come
        self._begun = False  # a piece of the current line has been shown
        self._update = b""  # the newest state of a line that carriage returns redraw, not shown yet
        self._update_s = 0.0
        self._last_s = 0.0
        self._refused = False
        self._resync = False  # the rest of a line whose head was refused is on its way
        self._dropped_lines = 0

    @property
    def waiting(self) -> bool:
        """``tick`` has something to do later."""
        return bool(self._carry or self._update or self._refused)

    def feed(self, data: bytes, now_s: float) -> None:
        self._last_s = now_s
        if self._refused or self._resync:
            data = self._after_refusal(data)
        if not data:
            return
        if self._raw:
            self._emit(data, fresh=False)
            return
        if self._carry:
            data, self._carry = self._carry + data, b""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
            if b"\r" in data:
                self._feed_updates(data, now_s)
                return
        body, newline, self._carry = data.rpartition(b"\n")
        if newline:
            self._update = b""
            self._lines(body)
        self._split_carry()

    def tick(self, now_s: float) -> None:
        """Show what has waited long enough."""
        if self._refused and self.console.has_room(self.source):
            self._notice()
        if self._update and now_s - self._update_s >= 1 / UPDATES_PER_S:
            self._show_update(now_s)
        if self._carry and now_s - self._last_s >= PARTIAL_S:
            self._show_partial()

    def settle(self) -> None:
        """Show all there is, without waiting for the end of a line."""
        if self._update:
            self._show_update(self._last_s)
        if self._carry:
            self._show_partial()

    def finish(self) -> None:
        """The stream has ended, and with it its last line."""
        self.settle()
        if self._begun:
            self._emit(b"\n", fresh=False)
            self._begun = False
        if self._refused:
            self._notice()

    # --- whole lines ----------------------------------------------------------------------------------

    def _lines(self, body: bytes) -> None:
        """Show ``body`` plus its final line feed."""
        first = body.find(b"\n")
        if (first if first >= 0 else len(body)) > MAX_LINE_BYTES:
            # Only the first line can be that long: reads are no longer than it.
            first = first if first >= 0 else len(body)
            size = MAX_LINE_BYTES
            pieces = [body[at : min(at + size, first)] for at in range(0, first, size)]
            body = b"\n".join(pieces) + body[first:]
        prefix = self.source.prefix
        shown = body.replace(b"\n", b"\n" + prefix) if prefix else body
        fresh, self._begun = not self._begun, False
        self._emit((prefix if fresh else b"") + shown + b"\n", fresh=fresh)

    def _split_carry(self) -> None:
        if len(self._carry) > MAX_LINE_BYTES:
            body, self._carry = self._carry, b""
            self._lines(body)

    def _show_partial(self) -> None:
        if self._carry.endswith(b"\r"):
            line, self._carry = self._redrawn(self._carry), b""
            if line:
                self._lines(line)
            return
        fresh, self._begun = not self._begun, True
        text, self._carry = self._carry, b""
        self._emit((self.source.prefix if fresh else b"") + text, fresh=fresh)

    # --- lines that carriage returns redraw -----------------------------------------------------------

    def _feed_updates(self, data: bytes, now_s: float) -> None:
        # One at the very end waits: with a line feed behind it, it is an ordinary end of line.
        held = b"\r" if data.endswith(b"\r") else b""
        *lines, rest = data[: len(data) - len(held)].split(b"\n")
        if lines:
            self._update = b""
            first = self._redrawn(lines[0])
            shown = [first] if first or b"\r" not in lines[0] else []
            shown += [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[1:]]
            if shown:
                self._lines(b"\n".join(shown))
        head, carriage, self._carry = rest.rpartition(b"\r")
        if carriage:
            self._update = self._redrawn(head + b"\r") or self._update
        self._carry += held
        if self._update and now_s - self._update_s >= 1 / UPDATES_PER_S:
            self._show_update(now_s)
        self._split_carry()

    def _redrawn(self, line: bytes) -> bytes:
        """What its carriage returns left to see of a line. A part shown already gets its own line."""
        if b"\r" not in line:
            return line
        if self._begun:
            head, _, line = line.partition(b"\r")
            self._lines(head)
        return line.rstrip(b"\r").rpartition(b"\r")[2]

    def _show_update(self, now_s: float) -> None:
        line, self._update = self._update, b""
        self._update_s = now_s
        self._lines(line)

    # --- a console without room -----------------------------------------------------------------------

    def _emit(self, data: bytes, *, fresh: bool) -> None:
        if not self._refused and self.console.put(self.source, data, fresh=fresh):
            return
        self._refused = True
        self._dropped_lines += data.count(b"\n")
        self._resync = bool(self._carry) or not data.endswith(b"\n")
        self._carry = self._update = b""
        self._begun = False

    def _after_refusal(self, data: bytes) -> bytes:
        """Drop whole lines until there is room; returns what may be shown of ``data``."""
        if self._refused and not self.console.has_room(self.source):
            self._dropped_lines += data.count(b"\n")
            self._resync = not data.endswith((b"\n", b"\r"))
            return b""
        if self._resync:
            cut = (data.find(b"\n") + 1) or (data.find(b"\r") + 1)
            if not cut:
                return b""
            self._dropped_lines += 1
            data = data[cut:]
            self._resync = False
        if self._refused:
            self._notice()
        return data

    def _notice(self) -> None:
        """One line in place of those that were dropped."""
        count = max(1, self._dropped_lines)
        where = "all of it is" if self._log.complete else "the log is"
        what = f"{count:,} lines of rank {self._rank} not shown here"
        text = f"[closeranks: {what}; {where} in {self._log.path}]\n".encode("utf-8", "surrogateescape")
        if not self.console.put(self.source, text, fresh=True, force=True):
            return
        self._refused = False
        self._dropped_lines = 0
        self._report({"type": "dropped", "rank": self._rank, "lines": count, "path": self._log.path})


class LineFilter:
    """Lines of one stream that contain one of ``needles``, with the rank's prefix, for the filtered log."""

    def __init__(self, needles: tuple[bytes, ...], prefix: bytes, sink: Callable[[bytes], None]) -> None:
        self._needles = needles
        self._prefix = prefix
        self._sink = sink
        self._carry = b""

    def feed(self, data: bytes) -> None:
        body, newline, rest = data.rpartition(b"\n")
        if newline:
            self._pass(self._carry + body)
            self._carry = rest
        else:
            self._carry += rest
        if len(self._carry) > MAX_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        if self._carry:
            body, self._carry = self._carry, b""
            self._pass(body)

    def _pass(self, body: bytes) -> None:
        needles = self._needles
        if not any(needle in body for needle in needles):
            return
        lines = [line for line in body.split(b"\n") if any(needle in line for needle in needles)]
        if lines:
            self._sink(b"".join(self._prefix + line + b"\n" for line in lines))

"""Who is attached: the newest line of each node, and how its clock stands to ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from closeranks.controller import sessions
from closeranks.controller.sessions import NodeProgress, Session, Sessions
from closeranks.linux import boot_id


class Line:
    """A peer, as far as this goes."""

    def __init__(self) -> None:
        self.closed = ""
        self.sent: list[Mapping[str, Any]] = []

    def close(self, reason: str) -> None:
        self.closed = reason

    def send(self, message: Mapping[str, Any]) -> bool:
        self.sent.append(message)
        return not self.closed


def session(node: str = "a", boot: str = "elsewhere") -> Session:
    return Session.of({"node": node, "session": "s1", "boot": boot}, Line())  # type: ignore[arg-type]


def beat(mono_ns: int, **more: Any) -> dict[str, Any]:
    return {"mono_ns": mono_ns, "generation": None, "progress": None, **more}


def test_the_newest_line_of_a_node_counts_and_the_older_is_closed() -> None:
    known, old, new = Sessions(), session(), session()
    known.add(old)
    known.add(new)
    assert known.get("a") is new and len(known) == 1 and old.peer.closed
    known.remove(old)
    assert known.is_current(new) and known.send("a", {"type": "ready"})
    known.remove(new)
    assert known.get("a") is None and not known.send("a", {"type": "ready"})


def test_all_that_are_attached_can_be_gone_through_while_some_leave() -> None:
    known = Sessions()
    for node in "abc":
        known.add(session(node))
    for entry in known:
        known.remove(entry)
    assert len(known) == 0


def test_the_quickest_message_says_best_how_the_clocks_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = session()
    for now_ns, theirs_ns, best_ns in ((1000, 200, 800), (2000, 1300, 700), (9000, 100, 700)):
        monkeypatch.setattr(sessions.time, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        entry.heard(beat(theirs_ns))
        assert entry.offset_ns == best_ns
    assert entry.heard_ns == 9000


def test_on_one_host_there_is_one_clock() -> None:
    entry = session(boot=boot_id())
    entry.heard(beat(5))
    assert entry.offset_ns == 0
    assert not session(boot="").same_host, "a host that can't say is another one"


def test_progress_stays_until_there_is_newer() -> None:
    entry = session()
    entry.heard(beat(1, generation=2, progress=[7, -1, 1, 6, True]))
    assert entry.progress == NodeProgress(2, 7, -1, 1, 6, True)
    entry.heard(beat(2))
    assert entry.progress == NodeProgress(2, 7, -1, 1, 6, True)


def test_when_a_node_was_last_heard_is_known_for_a_while_after_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_MAX_REMEMBERED", 3)
    known = Sessions()
    assert known.last_heard_ns("a") is None
    heard = {}
    for node in "abcd":
        entry = session(node)
        known.add(entry)
        assert known.last_heard_ns(node) == entry.heard_ns
        known.remove(entry)
        heard[node] = entry.heard_ns
    assert known.last_heard_ns("a") is None
    assert {node: known.last_heard_ns(node) for node in "bcd"} == {node: heard[node] for node in "bcd"}

"""Slurm's text, of several versions, and what people and chance make of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engines.slurm_text import (
    MAX_HOSTS,
    MAX_REASON_CHARS,
    Fate,
    JobView,
    NodeView,
    StepView,
    expand_hostlist,
    fates,
    one_line,
    parse_gres,
    parse_job,
    parse_nodes,
    parse_steps,
    parse_submitted,
    refusal,
)

# --- hosts ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("None assigned", []),
        ("n/a", []),
        ("node7", ["node7"]),
        ("a,b,,c,", ["a", "b", "c"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("x[8-011]", ["x8", "x9", "x10", "x11"]),
        ("n[1,3-4,7]", ["n1", "n3", "n4", "n7"]),
        ("n[2-3,1,2]", ["n2", "n3", "n1"]),
        ("r[0-1]n[00-01]", ["r0n00", "r0n01", "r1n00", "r1n01"]),
        ("gpu[1-2]-ib,login", ["gpu1-ib", "gpu2-ib", "login"]),
        ("c1-[5-6].site.org", ["c1-5.site.org", "c1-6.site.org"]),
        ("[1-2]", ["1", "2"]),
        ("a, b[1,3]\n", ["a", "b1", "b3"]),
    ],
)
def test_hostlists(text: str, names: list[str]):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1-2]",
        "n[]",
        "n[3-1]",
        "n[a-b]",
        "n[[1-2]]",
        "n[1-2][",
        "a b",
        "n[1-]",
        "n[-2]",
        "n[1--2]",
        "n[²]",
    ],
)
def test_what_is_no_hostlist_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[0-99999999999999999999]",
        "n[0-65535],m[0-65535]",
        "[0-999][0-999]",
        "[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]",
        f"n[{','.join(['0-65535'] * 1000)}]",
    ],
)
def test_a_small_text_does_not_become_an_endless_list(text: str):
    with pytest.raises(ValueError, match=r"more than|too long"):
        expand_hostlist(text)


def test_as_many_hosts_as_slurm_allows():
    assert len(expand_hostlist(f"n[0-{MAX_HOSTS - 1}]")) == MAX_HOSTS


@settings(deadline=None)
@given(st.text(alphabet="ab019[]-,. \n(", max_size=40))
def test_any_text_is_a_list_or_is_refused(text: str):
    try:
        names = expand_hostlist(text)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(names) == len(set(names))
        assert not any(set(name) & set("[], \n") for name in names)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 30)), min_size=1, max_size=8), st.integers(1, 4)
)
def test_ranges_expand_to_every_number_in_them(ranges: list[tuple[int, int]], width: int):
    text = ",".join(f"{low:0{width}d}-{low + more}" for low, more in ranges)
    wanted = [f"n{number:0{width}d}" for low, more in ranges for number in range(low, low + more + 1)]
    if all(
        len(f"{low:0{width}d}") == width for low, _ in ranges
    ):  # else Slurm's widths differ within the list
        assert expand_hostlist(f"n[{text}]") == list(dict.fromkeys(wanted))


# --- nodes ---

# From 22.05, and, cut to what is read, as 20.11 and 23.11 print it.
SHOWN = """\
NodeName=node5 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=1.61
   AvailableFeatures=(null)
   NodeAddr=10.0.0.5 NodeHostName=host5 Port=25022 Version=22.05.8
   OS=Linux State=DOWN in its name
   State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=train
   Reason=fan "x" | a=b noise [root@2026-12-01T15:47:25]

NodeName=node6 Arch=x86_64 CoresPerSocket=32
   NodeAddr=node6 NodeHostName=node6 Version=20.11.9
   State=DOWN*+DRAIN ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=Not responding [slurm@2026-12-01T15:50:44]
          and a second line [root@x]
   Comment=(null)

NodeName=node7 Arch=x86_64 CoresPerSocket=32
   NodeAddr=(null) NodeHostName=node7 Version=23.11.4
   State=ALLOCATED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   ReservationName=x

NodeName=node5
   State=DOWN
"""


def test_nodes():
    assert parse_nodes(SHOWN) == {
        "node5": NodeView("node5", frozenset({"IDLE", "DRAIN"}), 'fan "x" | a=b noise', "10.0.0.5"),
        "node6": NodeView("node6", frozenset({"DOWN", "NOT_RESPONDING", "DRAIN"}), "Not responding", "node6"),
        "node7": NodeView("node7", frozenset({"ALLOCATED"})),
    }


def test_no_nodes():
    assert parse_nodes("") == {}
    assert parse_nodes("slurm_load_nodes error: Unable to contact slurm controller\n") == {}
    assert parse_nodes("NodeName=x without a state\n") == {}


@pytest.mark.parametrize(
    ("state", "fate"),
    [
        ("IDLE", Fate.FINE),
        ("ALLOCATED", Fate.FINE),
        ("MIXED+CLOUD", Fate.FINE),
        ("MIXED+PLANNED", Fate.FINE),
        ("COMPLETING", Fate.FINE),
        ("ALLOCATED+RESERVED+MAINTENANCE", Fate.FINE),
        ("MIXED+REBOOT_REQUESTED", Fate.FINE),
        ("UNKNOWN", Fate.FINE),
        ("MIXED+NOT_RESPONDING", Fate.SILENT),
        ("ALLOCATED*", Fate.SILENT),
        ("IDLE+DRAIN", Fate.DRAINS),
        ("MIXED+DRAIN", Fate.DRAINS),
        ("draining", Fate.DRAINS),
        ("drained*", Fate.DRAINS),
        ("MIXED+DRAIN+NOT_RESPONDING", Fate.DRAINS),
        ("ALLOCATED+FAIL", Fate.DRAINS),
        ("failing", Fate.DRAINS),
        ("DOWN", Fate.GONE),
        ("DOWN*", Fate.GONE),
        ("down~", Fate.GONE),
        ("DOWN+DRAIN", Fate.GONE),
        ("DOWN+NOT_RESPONDING", Fate.GONE),
        ("IDLE+CLOUD+POWERED_DOWN", Fate.GONE),
        ("IDLE+POWERING_DOWN", Fate.GONE),
        ("idle%", Fate.GONE),
        ("DOWN+REBOOT_ISSUED", Fate.GONE),
        ("ERROR", Fate.GONE),
    ],
)
def test_what_a_state_means(state: str, fate: Fate):
    (view,) = parse_nodes(f"NodeName=n\n   State={state} ThreadsPerCore=1\n").values()
    assert view.fate is fate
    assert view.words


def test_fates_of_an_allocation():
    text = "".join(
        f"NodeName={name}\n   State={state} ThreadsPerCore=1\n   Reason={reason}\n"
        for name, state, reason in (
            ("a", "MIXED", ""),
            ("b", "DOWN+NOT_RESPONDING", "Not responding [slurm@2026-12-01T15:50:44]"),
            ("c", "MIXED+DRAIN", "fan [root@2026-12-01T15:50:44]"),
            ("d", "IDLE", ""),
            ("e", "MIXED+DRAIN", ""),
        )
    )
    assert fates("abcdefg", parse_nodes(text), "abcef") == {
        "a": (Fate.FINE, "mixed"),
        "b": (Fate.GONE, "down+not_responding: Not responding"),
        "c": (Fate.DRAINS, "fan"),
        "d": (Fate.GONE, "it left the allocation (idle)"),
        "e": (Fate.DRAINS, "drain+mixed"),
        "f": (Fate.SILENT, "slurmctld doesn't know it any more"),
        "g": (Fate.GONE, "it left the allocation (slurmctld doesn't know it any more)"),
    }


@settings(deadline=None)
@given(st.text())
def test_any_text_about_nodes_is_survived(text: str):
    record = f"NodeName=n\n   State=MIXED+DRAIN X=1\n   Reason={text}"
    (first, *_) = parse_nodes(record).values()
    assert first.fate is Fate.DRAINS
    for said in (first.reason, first.words, one_line(text)):
        assert len(said) <= MAX_REASON_CHARS
        assert not re.search(r"[\x00-\x1f\x7f]", said)
    parse_nodes(text)
    parse_steps(text)
    parse_submitted(text)
    parse_gres("   Nodes=n " + text) if "[" not in text else None
    assert "\n" not in refusal(text)


# --- jobs ---


def test_jobs():
    assert parse_job("RUNNING|node[0-1]\n") == JobView("RUNNING", ("node0", "node1"))
    assert parse_job("running|n0") == JobView("RUNNING", ("n0",))
    assert parse_job("PENDING|\n") == JobView("PENDING", ())
    assert parse_job("") is None
    states = ("RUNNING", "SUSPENDED", "COMPLETING", "CANCELLED", "PENDING", "TIMEOUT", "PREEMPTED")
    living = [state for state in states if JobView(state, ()).lives]
    assert living == ["RUNNING", "SUSPENDED"]


def test_steps():
    text = "7.0|a|b\n7.batch|batch\n7.extern|extern\n12_3.4|x\n5+1.0|y\nerror|odd\n\n9|z\n"
    assert parse_steps(text) == [
        StepView("7.0", "a|b"),
        StepView("7.batch", "batch"),
        StepView("7.extern", "extern"),
        StepView("12_3.4", "x"),
        StepView("5+1.0", "y"),
    ]


def test_gres():
    text = """\
   JOB_GRES=gpu:a100:12
     Nodes=node[0-1] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-1,4-5)
     Nodes=node2 CPU_IDs=7 Mem=10240 GRES=gpu:a100:4(IDX:0-3),nic:2(IDX:0,1),shard:0(IDX:)
     Nodes=node3 CPU_IDs=7 Mem=10240 GRES=
     Nodes=node4 CPU_IDs=7 Mem=0 GRES=gpu:8(IDX:0-7); rm
   NodeList=node[0-4]
"""
    assert parse_gres(text) == {
        "node0": "gpu:a100:4",
        "node1": "gpu:a100:4",
        "node2": "gpu:a100:4,nic:2",
        "node3": "",
        "node4": "",
    }


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("123\n", "123"),
        ("123;cluster-a\n", "123"),
        ("Welcome to lab!\n123\n", "123"),
        ("123\nsite: 2 jobs of yours are queued\n", "123"),
        ("", None),
        ("Submitted batch job x", None),
    ],
)
def test_submitted(text: str, job: str | None):
    assert parse_submitted(text) == job


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "Batch job submission failed: Invalid partition name specified",
        ),
        ("sbatch: unrecognized option '--x=1'\nTry --help\n", "unrecognized option '--x=1'"),
        ("slurm_load_jobs error: Invalid job id\n", "slurm_load_jobs error: Invalid job id"),
        ("something odd\n", "something odd"),
        ("", "it said nothing"),
    ],
)
def test_refusals(stderr: str, said: str):
    assert refusal(stderr) == said

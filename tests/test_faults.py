"""Fault specs: what a user writes is read exactly, or refused with a way out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.errors import UsageError
from closeranks.faults import (
    AGENT_KINDS,
    KINDS,
    TAMPER_KINDS,
    WORKER_KINDS,
    FaultSpec,
    carried_out_by_worker,
    format_spec,
    parse_spec,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("kill", FaultSpec("kill")),
        ("kill:rank=1,step=50", FaultSpec("kill", rank=1, step=50)),
        (" kill : rank = 1 , step = 50 ", FaultSpec("kill", rank=1, step=50)),
        ("stop:rank=any,after=200ms", FaultSpec("stop", after_s=0.2)),
        ("stop:after=1.5", FaultSpec("stop", after_s=1.5)),
        ("spin:after=2m,gen=3", FaultSpec("spin", after_s=120.0, generation=3)),
        ("segv:generation=any,step=2", FaultSpec("segv", step=2, generation=None)),
        ("slow:factor=2.5,for=10", FaultSpec("slow", params={"factor": 2.5, "for": 10})),
        ("exit:code=0", FaultSpec("exit", params={"code": 0})),
        ("oom:limit_mb=64", FaultSpec("oom", params={"limit_mb": 64})),
        ("exception:message=no luck", FaultSpec("exception", params={"message": "no luck"})),
        (
            r'exception:message="a, \"b\" = \\ c",step=1',
            FaultSpec("exception", step=1, params={"message": r'a, "b" = \ c'}),
        ),
    ],
)
def test_reads_what_people_write(text, spec):
    assert parse_spec(text) == spec
    assert parse_spec(format_spec(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1", "did you mean 'kill'"),
        ("hang", "did you mean 'hang-"),
        ("", "no kind ''; known: kill, stop"),
        ("zzz", "known: kill, stop"),
        ("kill:rnak=1", "did you mean 'rank'"),
        ("kill:steps=1", "did you mean 'step'"),
        ("kill:code=1", "kill takes no 'code'"),
        ("kill:rank=-1", "rank=-1 wants a whole number from 0"),
        ("kill:rank=1.5", "wants a whole number"),
        ("kill:rank=99999999999999999999999", "wants a whole number"),
        ("kill:step=0", "wants a whole number from 1"),
        ("kill:rank", "can't read 'rank'; write name=value"),
        ("kill:rank=1,", "write name=value"),
        ("kill:rank=1,,step=2", "write name=value"),
        ('kill:rank="1', "write name=value"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("kill:gen=1,generation=2", "generation is given twice"),
        ("kill:step=1,after=2", "exclude each other"),
        ("slow:factor=2,ms=3", "exclude each other"),
        ("slow:factor=nan", "wants a number from 1"),
        ("slow:factor=inf", "wants a number from 1"),
        ("kill:after=soon", "wants a time such as"),
        ("kill:after=-1", "wants a time such as"),
        ("kill:after=1000h", "at most 30 days"),
        ("exit:code=256", "from 0 to 255"),
        ("exception:message=" + "x" * 5000, "longer than 4,096 characters"),
    ],
)
def test_refuses_with_a_way_out(text, says):
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        spec = parse_spec(text)
    except UsageError:
        return
    assert spec.kind in KINDS


@st.composite
def specs(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    params = {}
    if kind == "exception" and draw(st.booleans()):
        params["message"] = draw(st.text(max_size=30))
    if kind == "leak" and draw(st.booleans()):
        params["mb"] = float(draw(st.integers(1, 1000)))
    if kind in ("slow", "leak") and draw(st.booleans()):
        params["for"] = draw(st.integers(1, 2**53))
    when = draw(st.sampled_from(["step", "after_s", None]))
    return FaultSpec(
        kind,
        rank=draw(st.none() | st.integers(0, 2**24)),
        step=draw(st.integers(1, 2**53)) if when == "step" else None,
        after_s=draw(st.integers(0, 10**6)) / 1000 if when == "after_s" else None,
        generation=draw(st.none() | st.integers(0, 1000)),
        params=params,
    )


@given(specs())
def test_text_and_spec_are_the_same_thing(spec):
    back = parse_spec(format_spec(spec))
    if spec.after_s is not None:
        assert math.isclose(back.after_s, spec.after_s, abs_tol=1e-9)
        back = FaultSpec(back.kind, back.rank, back.step, spec.after_s, back.generation, back.params)
    assert back == spec


def test_defaults_come_from_the_table():
    assert parse_spec("leak").get("mb") == 16.0
    assert parse_spec("leak:mb=2").get("mb") == 2.0
    assert parse_spec("slow").get("factor") is None


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_described_and_has_a_side(kind):
    assert KINDS[kind].description
    assert all(parameter.meaning for parameter in KINDS[kind].parameters.values())
    assert kind in WORKER_KINDS
    assert carried_out_by_worker(FaultSpec(kind, step=5))
    assert carried_out_by_worker(FaultSpec(kind, after_s=5.0)) == (kind not in AGENT_KINDS)
    assert carried_out_by_worker(FaultSpec(kind)) == (kind not in AGENT_KINDS)


def test_tampering_is_a_rank_s_own():
    assert {"skip", "dtype", "size", "op"} == TAMPER_KINDS
    assert not TAMPER_KINDS & AGENT_KINDS

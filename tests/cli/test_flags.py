"""Flags against torch's own parser, the reference page, and what people type by mistake."""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.cli import flags_values
from closeranks.cli.flags import parse, parse_run
from closeranks.cli.flags_help import help_page, markdown_table
from closeranks.cli.flags_table import ENVIRONMENT, FLAGS, GROUPS
from closeranks.config import BudgetConfig, Entrypoint, HangConfig, LogConfig, RunConfig, StdStreams
from closeranks.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs/reference/torchrun-flags.md"
BY_NAME = {flag.name: flag for flag in FLAGS}


def config(line: str, environ: dict[str, str] | None = None) -> RunConfig:
    return parse_run(line.split(), environ or {}, lambda: "NEW-ID")


def error(line: str | list[str], environ: dict[str, str] | None = None) -> str:
    argv = line.split() if isinstance(line, str) else line
    with pytest.raises(UsageError) as caught:
        parse_run(argv, environ or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- the table, torch's parser and the page agree ---------------------------------------------------


@pytest.fixture(scope="module")
def torch_parser():
    with contextlib.redirect_stderr(io.StringIO()):
        from torch.distributed.run import get_args_parser

        saved = {k: os.environ.pop(k) for k in list(os.environ) if k.startswith("PET_")}
        try:
            return get_args_parser()
        finally:
            os.environ.update(saved)


@pytest.mark.torch
def test_every_option_of_torchrun_is_taken_with_the_same_shape(torch_parser) -> None:
    from torch.distributed.argparse_util import check_env, env

    actions = [a for a in torch_parser._actions if a.option_strings]
    assert len(actions) > 25
    for action in actions:
        ours = BY_NAME[action.dest]
        assert set(action.option_strings) <= set(ours.spellings), action.dest
        assert ours.is_switch == (action.nargs == 0), action.dest
        assert ours.pet == isinstance(action, env | check_env), action.dest
        assert ours.torchrun, f"{action.dest} must say what torchrun does with it"
    assert {f.name for f in FLAGS if f.torchrun} == {a.dest for a in actions}, "a flag that torch hasn't"


@pytest.mark.torch
def test_short_forms_that_torchrun_takes_mean_the_same_here(torch_parser) -> None:
    actions = [a for a in torch_parser._actions if a.option_strings]
    options = {s: a for a in actions for s in a.option_strings if s.startswith("--")}
    beginnings = {option[:end] for option in options for end in range(3, len(option) + 1)}
    checked = 0
    for beginning in sorted(beginnings):
        meant = {a.dest for option, a in options.items() if option.startswith(beginning)}
        if len(meant) > 1 and beginning not in options:
            continue
        dest = options[beginning].dest if beginning in options else meant.pop()
        flag = BY_NAME[dest]
        try:
            assert dest in parse([beginning, *([] if flag.is_switch else ["1"])], {}).settings
        except UsageError as refused:  # 1 isn't everyone's value, but the flag has been found
            assert str(refused).startswith((f"{beginning} '1': ", f"{flag.long} '1': "))
        checked += 1
    assert checked > 150


# Values both parsers take as they are, for each destination.
_VALUES = {
    "nproc_per_node": ["1", "4", "auto", "cpu"], "nnodes": ["1", "1:1"], "rdzv_backend": ["static", "c10d"],
    "rdzv_endpoint": ["a:1", ""], "rdzv_id": ["x", "7"], "rdzv_conf": ["a=b", ""], "max_restarts": ["0", "3"],
    "monitor_interval": ["0.1", "5"], "start_method": ["spawn", "fork"], "event_log_handler": ["null"],
    "role": ["trainer", "-"], "log_dir": ["logs"], "redirects": ["0", "3", "0:1,1:2"], "tee": ["1", "2:3"],
    "local_ranks_filter": ["", "0,1"], "duplicate_stdout_filters": ["a,b", "a,,b,,,c", "", "-x y"],
    "duplicate_stderr_filters": ["a", ",,"], "node_rank": ["0"], "master_addr": ["127.0.0.1", "host"],
    "master_port": ["29500", "1"], "local_addr": ["10.0.0.1"], "logs_specs": ["x"], "numa_binding": ["node"],
    "signals_to_handle": ["SIGTERM,SIGUSR1"], "shutdown_timeout": ["0", "30"],
}  # fmt: skip


def _as_torch_has_it(name: str, value: object) -> object:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.run import parse_min_max_nnodes

    match name:
        case "nnodes":
            return parse_min_max_nnodes(str(value))
        case "redirects" | "tee":
            std = Std.from_str(str(value))
            return StdStreams(0, std) if isinstance(std, dict) else StdStreams(int(std))
        case "local_ranks_filter":
            return frozenset(map(int, str(value).split(","))) if value else None
        case "duplicate_stdout_filters" | "duplicate_stderr_filters":
            return tuple(value)  # type: ignore[arg-type]
        case "rdzv_conf":
            return dict(pair.split("=") for pair in str(value).split(",")) if value else {}
        case "signals_to_handle":
            return tuple(str(value).split(","))
    return value


_SPELLED = [
    (name, spelling, value)
    for name, values in _VALUES.items()
    for spelling in BY_NAME[name].spellings
    for value in values
]
_SWITCHES = [
    (name, spelling, None)
    for name in ("standalone", "module", "no_python", "run_path", "virtual_local_rank")
    for spelling in BY_NAME[name].spellings
]


@pytest.mark.torch
@settings(max_examples=200, deadline=None)
@given(
    flags=st.lists(st.tuples(st.sampled_from(_SPELLED + _SWITCHES), st.booleans()), max_size=8),
    script=st.sampled_from(["t.py", "dir/t.py", "pkg.mod"]),
    args=st.lists(st.sampled_from(["--lr", "0.1", "-r", "x", "--nproc-per-node", "-"]), max_size=4),
)
def test_random_command_lines_read_as_torchrun_reads_them(torch_parser, flags, script, args) -> None:
    argv: list[str] = []
    for (_, spelling, value), joined in flags:
        if value is None:
            argv.append(spelling)
        elif joined and spelling.startswith("--"):
            argv.append(f"{spelling}={value}")
        else:
            argv += [spelling, value]
    theirs = torch_parser.parse_args([*argv, script, *args])
    ours = parse([*argv, script, *args], {})
    assert ours.rest == (theirs.training_script, *theirs.training_script_args)
    for (name, _, _), _ in flags:
        assert ours.value(name) == _as_torch_has_it(name, getattr(theirs, name)), name
    given_names = {name for (name, _, _), _ in flags}
    assert set(ours.settings) == given_names


def _between(text: str, mark: str) -> str:
    return text.split(f"<!-- {mark}:begin -->\n")[1].split(f"<!-- {mark}:end -->")[0]


def test_the_reference_page_holds_the_table() -> None:
    """CLOSERANKS_WRITE_DOCS=1 writes the tables into the page instead of comparing."""
    tables = {
        "torchrun": markdown_table(tuple(f for f in FLAGS if f.torchrun)),
        "own": markdown_table(tuple(f for f in FLAGS if not f.torchrun)),
        "environment": markdown_table(ENVIRONMENT),
    }
    page = PAGE.read_text()
    if os.environ.get("CLOSERANKS_WRITE_DOCS"):
        for mark, table in tables.items():
            page = page.replace(
                f"{mark}:begin -->\n{_between(page, mark)}<!--", f"{mark}:begin -->\n{table}<!--"
            )
        PAGE.write_text(page)
    for mark, table in tables.items():
        assert _between(page, mark) == table, f"{PAGE.name} is behind; CLOSERANKS_WRITE_DOCS=1 renews it"


def test_the_help_page_has_every_flag_and_fits_the_terminal() -> None:
    page = help_page()
    for flag in FLAGS:
        assert f"{flag.long} " in page or f"{flag.long}\n" in page
    assert [line for line in page.splitlines() if line in {f"{g}:" for g in GROUPS}] == [
        f"{g}:" for g in GROUPS
    ]
    assert max(map(len, page.splitlines())) <= 88


def test_the_table_is_sound() -> None:
    spellings = [s for f in FLAGS for s in f.spellings]
    assert len(spellings) == len(set(spellings)), "two flags under one name"
    assert all(f.group in GROUPS and f.effect for f in (*FLAGS, *ENVIRONMENT))
    assert {f.name for f in FLAGS if f.no_effect} == {
        "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "monitor_interval", "start_method",
        "event_log_handler", "logs_specs",
    }  # fmt: skip


def test_defaults_told_are_the_defaults_used() -> None:
    hang, budget, run = HangConfig(), BudgetConfig(), RunConfig(Entrypoint("script", ""))
    assert f"default {hang.hang_timeout_s:g}" in BY_NAME["hang_timeout"].effect
    assert f"default: {budget.default_max_restarts}" in BY_NAME["max_restarts"].effect
    assert f"default {run.shutdown_timeout_s:g}" in BY_NAME["shutdown_timeout"].effect
    assert f"default {','.join(run.signals_to_handle)}" in BY_NAME["signals_to_handle"].effect
    assert f"default {run.master_addr}" in BY_NAME["master_addr"].effect
    assert f"default {run.runs_dir}" in BY_NAME["log_dir"].effect
    assert f"default {run.nproc_per_node}" in BY_NAME["nproc_per_node"].effect


# --- where values go --------------------------------------------------------------------------------


def test_without_flags_everything_is_default() -> None:
    assert config("t.py") == RunConfig(Entrypoint("script", "t.py"), run_id="NEW-ID")


def test_every_value_reaches_its_place() -> None:
    got = config(
        "--nproc_per_node 4 --max-restarts 7 --rdzv-id job7 --role trainer --master-addr [::1] "
        "--master-port 29501 --local-addr 10.0.0.1 --log-dir logs -r 3 -t 0:1,12:2 --local-ranks-filter 0,2 "
        "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters d --signals-to-handle term,10,SIGHUP "
        "--shutdown-timeout 5 --numa-binding core-complex --virtual-local-rank --no-zygote --preload a,b.c "
        "--preload d --hang-timeout 12.5 --hang-detection off --job-name j-1 --quiet "
        "t.py --x"
    )
    assert got == RunConfig(
        entrypoint=Entrypoint("script", "t.py", ("--x",)),
        nproc_per_node="4",
        run_id="job7",
        role="trainer",
        master_addr="::1",
        master_port=29501,
        local_addr="10.0.0.1",
        runs_dir="logs",
        job_name="j-1",
        zygote=False,
        preload=("a", "b.c", "d"),
        signals_to_handle=("SIGTERM", "SIGUSR1", "SIGHUP"),
        shutdown_timeout_s=5,
        numa_binding="core-complex",
        virtual_local_rank=True,
        budget=BudgetConfig(max_restarts=7),
        hang=HangConfig(enabled=False, hang_timeout_s=12.5),
        logs=LogConfig(
            redirects=StdStreams(3),
            tee=StdStreams(0, {0: 1, 12: 2}),
            console_ranks=frozenset({0, 2}),
            stdout_filters=("a,b", "c"),
            stderr_filters=("d",),
        ),
        notices=("--preload has no effect with --no-zygote: there is no process to preload into.",),
        quiet=True,
    )


@pytest.mark.parametrize(
    ("line", "kind", "target"),
    [
        ("t.py", "script", "t.py"),
        ("-m pkg.t", "module", "pkg.t"),
        ("--module pkg.t", "module", "pkg.t"),
        ("--no-python ./t.sh", "command", "./t.sh"),
        ("--no_python --run-path t.py", "script", "t.py"),
        ("-m --run_path t.py", "script", "t.py"),
        ("-- t.py", "script", "t.py"),
        ("-mr3 pkg.t", "module", "pkg.t"),
    ],
)
def test_what_the_target_is(line: str, kind: str, target: str) -> None:
    assert config(line).entrypoint == Entrypoint(kind, target)


@pytest.mark.parametrize(
    "args",
    [
        ["--", "--x"],
        ["--nproc-per-node", "9", "-m", "--quiet"],
        ["--no", "--help", "-h", "--r"],
        ["", "a b", "-", "--=", "\n", "é", "\udcff"],
        ["--"],
    ],
)
def test_what_follows_the_script_is_untouched(args: list[str]) -> None:
    got = parse_run(["--nproc-per-node", "2", "t.py", *args], {})
    assert got.entrypoint.args == tuple(args)
    assert got.nproc_per_node == "2"
    assert got.quiet is False


def test_hang_timeout_0_is_never() -> None:
    assert config("--hang-timeout 0 t.py").hang == HangConfig(hang_timeout_s=math.inf)


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert config("--role a --role=b t.py").role == "b"


@pytest.mark.parametrize(
    "line", ["-r3 t.py", "-r 3 t.py", "-r=3 t.py", "--redir 3 t.py", "--redirects=3 t.py"]
)
def test_ways_to_give_a_value(line: str) -> None:
    assert config(line).logs.redirects == StdStreams(3)


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("t.py", "NEW-ID"),
        ("--standalone t.py", "NEW-ID"),
        ("--standalone --rdzv-id a t.py", "NEW-ID"),
        ("--rdzv-id a t.py", "a"),
        ("--master-port 29500 t.py", "none"),
        ("--rdzv-endpoint h:1 t.py", "none"),
        ("--rdzv-backend c10d t.py", "none"),
        ("--rdzv-backend c10d --rdzv-id a t.py", "a"),
        ("--rdzv-backend static t.py", "NEW-ID"),
    ],
)
def test_run_id_as_torchrun_makes_it(line: str, run_id: str) -> None:
    assert config(line).run_id == run_id


def test_fresh_ids_differ() -> None:
    assert parse_run(["t.py"], {}).run_id != parse_run(["t.py"], {}).run_id


@pytest.mark.parametrize(
    ("line", "address"),
    [
        ("t.py", "127.0.0.1"),
        ("--local-addr 10.0.0.1 t.py", "10.0.0.1"),
        ("--local-addr 10.0.0.1 --master-addr 10.0.0.2 t.py", "10.0.0.2"),
    ],
)
def test_master_addr(line: str, address: str) -> None:
    assert config(line).master_addr == address


# --- environment ------------------------------------------------------------------------------------


def test_pet_variables_stand_in_for_flags() -> None:
    environ = {
        "PET_NPROC_PER_NODE": "3",
        "PET_MODULE": "1",
        "PET_NO_PYTHON": "0",
        "PET_MAX_RESTARTS": "2",
        "PET_TEE": "3",
        "PET_RDZV_CONF": "",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NUMA_BINDING": "node",  # torchrun has no such variable
        "PET_QUIET": "1",
        "UNRELATED": "x",
    }
    got = config("--tee 1 pkg.t", environ)
    assert got.entrypoint == Entrypoint("module", "pkg.t")
    assert got.nproc_per_node == "3"
    assert got.budget.max_restarts == 2
    assert got.logs.tee == StdStreams(1), "a flag beats its variable"
    assert got.numa_binding is None
    assert got.quiet is False
    assert got.notices == (
        "PET_RDZV_BACKEND, PET_RDZV_CONF have no effect here: on one machine the workers meet in a store of "
        "their own.",
    )


def test_variables_without_a_flag() -> None:
    environ = {"PYTHON_EXEC": "/opt/python", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] "}
    got = config("t.py", environ)
    assert got.python == "/opt/python"
    assert got.logs.prefix_template == "[${rank}] "


@pytest.mark.parametrize(
    ("line", "environ", "seconds"),
    [
        ("t.py", {}, 30),
        ("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7),
        ("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "PET_SHUTDOWN_TIMEOUT": "8"}, 8),
        ("--shutdown-timeout 9 t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 9),
    ],
)
def test_shutdown_timeout(line: str, environ: dict[str, str], seconds: float) -> None:
    assert config(line, environ).shutdown_timeout_s == seconds


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE='yes': want 1 (on) or 0 (off)"),
        ({"PET_STANDALONE": ""}, "PET_STANDALONE=''"),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE='many'"),
        ({"PET_NNODES": "2"}, "PET_NNODES asks for 2 nodes; say with --engine where they come from"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'"),
        ({"PYTHON_EXEC": ""}, "PYTHON_EXEC=''"),
    ],
)
def test_errors_name_the_variable(environ: dict[str, str], named: str) -> None:
    assert named in error("t.py", environ)


# --- notices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.no_effect], ids=lambda f: f.name)
def test_a_flag_without_effect_is_taken_and_said_once(flag) -> None:
    value = _VALUES[flag.name][0]
    assert config("t.py").notices == ()
    for spelling in flag.spellings:
        (notice,) = config(f"{spelling} {value} {spelling} {value} t.py").notices
        assert notice.startswith(f"{spelling} has no effect here: ")
        assert notice.endswith(".")


def test_same_reason_one_notice() -> None:
    (notice,) = config("--rdzv-backend c10d --rdzv_endpoint h:1 t.py").notices
    assert notice.startswith("--rdzv-backend, --rdzv_endpoint have no effect here: ")


@pytest.mark.parametrize(
    "line", ["--standalone t.py", "--nnodes 1 t.py", "--nnodes 1:1 t.py", "--node-rank 0 t.py"]
)
def test_what_is_already_so_is_silent(line: str) -> None:
    assert config(line).notices == ()


def test_other_notices() -> None:
    assert config("--nnodes 1:4 t.py").notices == (
        "--nnodes allows up to 4 nodes; without --engine it runs on this one alone.",
    )
    (notice,) = config("--preload a --no-python ./t").notices
    assert notice == "--preload has no effect with --no-python: there is no process to preload into."
    (notice,) = config("--standalone --rdzv-id a t.py").notices
    assert notice.startswith("--rdzv-id has no effect under --standalone")


def test_several_nodes_come_from_an_engine() -> None:
    options = "--engine-option hosts=a,b --engine-option prefix=x"
    made = config(f"--engine local --nnodes 2:4 --spares 1 --lease 0.5 {options} t.py")
    assert (made.cluster.min_nodes, made.cluster.max_nodes, made.cluster.spares) == (2, 4, 1)
    assert made.cluster.lease_s == 0.5
    assert (made.engine, made.engine_options) == ("local", ("hosts=a,b", "prefix=x"))
    assert made.notices == ()


def test_an_engine_alone_means_one_node_of_it() -> None:
    made = config("t.py", {"CLOSERANKS_ENGINE": "local"})
    assert (made.engine, made.cluster.min_nodes, made.cluster.max_nodes) == ("local", 1, 1)
    assert config("--nnodes 1:4 t.py").cluster.max_nodes == 1, "without one it runs on this host alone"


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", "nothing to run: closeranks run [flags] script.py"),
        ("--nproc-per-node 2", "nothing to run"),
        ("--nproc-per-node 0 t.py", "--nproc-per-node '0': want at least 1 rank"),
        ("--nproc-per-node -2 t.py", "want at least 1 rank"),
        ("--nproc_per_node two t.py", "--nproc_per_node 'two': want a number of ranks (1 or more), or auto"),
        ("--nproc-per-node 1.5 t.py", "want a number of ranks"),
        ("--nproc-per-node= t.py", "want a number of ranks"),
        (f"--nproc-per-node {'9' * 5000} t.py", "(5000 characters): want a number of ranks"),
        ("--nnodes 2 t.py", "--nnodes asks for 2 nodes; say with --engine where they come from"),
        ("--nnodes 2:4 t.py", "--nnodes asks for 2 nodes"),
        ("--spares 1 t.py", "--spares is about several nodes; say where from with --engine"),
        ("--engine-option hosts=a t.py", "--engine-option is about several nodes"),
        ("--lease 2 t.py", "--lease is about several nodes"),
        ("--engine local --spares -1 t.py", "--spares '-1': want"),
        ("--engine local --spares x t.py", "--spares 'x': want"),
        ("--engine local --lease 0 t.py", "--lease '0': want a number of seconds, above 0"),
        ("--engine local --lease -1 t.py", "want a number of seconds, above 0"),
        ("--engine local --lease nan t.py", "want a number of seconds, above 0"),
        ("--engine local --lease inf t.py", "want a number of seconds, above 0"),
        ("--engine local --lease soon t.py", "want a number of seconds, above 0"),
        ("--engine local --lease 86401 t.py", "want a number of seconds, above 0"),
        ("--engine local --engine-option hosts t.py", "--engine-option 'hosts': want NAME=VALUE"),
        ("--engine local --engine-option =a t.py", "want NAME=VALUE"),
        ("--engine local --engine-option 1a=b t.py", "want NAME=VALUE"),
        ("--nnodes 0 t.py", "want a number of machines, or MIN:MAX"),
        ("--nnodes 3:1 t.py", "want a number of machines, or MIN:MAX"),
        ("--nnodes 1:2:3 t.py", "want a number of machines, or MIN:MAX"),
        ("--nnodes a:b t.py", "want a number of machines, or MIN:MAX"),
        ("--node-rank 1 t.py", "this version runs one machine, whose rank is 0"),
        ("--node-rank -1 t.py", "this version runs one machine"),
        ("--node-rank x t.py", "want the rank of this machine, 0"),
        ("--max-restarts -1 t.py", "want 0 or more"),
        ("--max-restarts lots t.py", "want a whole number"),
        ("--monitor-interval nan t.py", "want a number of seconds, 0 or more"),
        ("--monitor-interval often t.py", "want a number of seconds"),
        ("--hang-timeout inf t.py", "want a number of seconds, 0 or more"),
        ("--hang-timeout -1 t.py", "want a number of seconds, 0 or more"),
        ("--hang-timeout 30m t.py", "want a number of seconds"),
        ("--hang-detection maybe t.py", "want on or off"),
        ("--start-method spwan t.py", "want one of spawn, fork, forkserver; did you mean spawn?"),
        ("--numa-binding nodes t.py", "did you mean node?"),
        ("--master-port 70000 t.py", "want a port between 1 and 65535"),
        ("--master-port http t.py", "want a port number"),
        ("--master-addr= t.py", "want a host name or an address"),
        ("-r 4 t.py", "-r '4': want 0, 1, 2 or 3"),
        ("--tee 0:1,1 t.py", "such as 0:3,1:2"),
        ("--tee 0:1, t.py", "such as 0:3,1:2"),
        ("--tee ²:1 t.py", "such as 0:3,1:2"),
        ("--local-ranks-filter 0,x t.py", "want local ranks with commas between them"),
        ("--local-ranks-filter -1 t.py", "want local ranks with commas between them"),
        ("--rdzv-conf timeout t.py", "want KEY=VALUE pairs"),
        ("--signals-to-handle SIGTRM t.py", "there is no signal 'SIGTRM'; did you mean SIGTERM?"),
        ("--signals-to-handle usr3 t.py", "did you mean SIGUSR"),
        ("--signals-to-handle 99 t.py", "there is no signal '99'"),
        ("--signals-to-handle SIGTERM, t.py", "want signals with commas between them"),
        ("--signals-to-handle 9 t.py", "SIGKILL can't be handled by any process"),
        ("--shutdown-timeout -5 t.py", "want 0 or more"),
        ("--preload a-b t.py", "'a-b' is no module name"),
        ("--preload a,,b t.py", "'' is no module name"),
        ("--job-name ../x t.py", "want 1 to 64 letters"),
        ("--job-name .x t.py", "want 1 to 64 letters"),
        (f"--job-name {'x' * 65} t.py", "want 1 to 64 letters"),
        ("--log-dir= t.py", "want a name, and this is empty"),
        ("--standalone=1 t.py", "--standalone is a switch and takes no value, not '1'"),
        ("-m --no-python t", "--no-python and -m exclude each other"),
        ("--role", "--role needs a value: --role NAME"),
        ("--role --tee 1 t.py", "'--tee' looks like a flag, so if it is the value write --role=--tee"),
        ("-r", "-r needs a value: -r WHICH"),
    ],
)  # fmt: skip
def test_bad_values(line: str, wanted: str) -> None:
    message = error(line)
    assert wanted in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--nproc-per-nod", None),  # short for it
        ("--nproc_per_nodes", "--nproc-per-node"),
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--nproc-per_node", "--nproc-per-node"),
        ("-nproc-per-node", "--nproc-per-node"),
        ("--max_restart5", "--max-restarts"),
        ("--Standalone", "--standalone"),
        ("--preloads", "--preload"),
    ],
)
def test_unknown_flags_get_the_nearest_one(flag: str, meant: str | None) -> None:
    if meant is None:
        assert config(f"{flag} 2 t.py").nproc_per_node == "2"
        return
    message = error(f"{flag} 2 t.py")
    assert f"there is no flag {flag}; did you mean {meant}?" in message
    assert "flags of the script itself go after the script" in message


def test_unknown_flags_without_a_near_one() -> None:
    assert "see closeranks run --help" in error("--zzzzzz t.py")
    assert "there is no flag -x" in error("-x t.py")
    assert "there is no flag -mx" in error("-mx t.py")
    assert len(error(["--" + "q" * 100_000, "t.py"])) < 300


def test_ambiguous_flags_name_what_they_could_be() -> None:
    message = error("--rdzv x t.py")
    assert message.startswith("--rdzv can mean --rdzv-id, --rdzv-backend, --rdzv-endpoint, --rdzv-conf;")
    assert "--hang can mean --hang-timeout, --hang-detection" in error("--hang 3 t.py")


def test_faults_are_bounded_and_checked() -> None:
    got = parse_run(["--inject", "kill:rank=1,step=2"] * 64 + ["t.py"], {})
    assert got.inject == ("kill:rank=1,step=2",) * 64
    assert "more than 64 times" in error(["--inject", "kill:rank=1,step=2"] * 65 + ["t.py"])
    assert error("--inject nosuchfault t.py")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_command_line_gives_a_config_or_a_usage_error(argv: list[str]) -> None:
    with contextlib.suppress(UsageError):
        assert parse_run(argv, {}).entrypoint.target in argv


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([f for f in (*FLAGS, *ENVIRONMENT) if f.metavar]), st.text(max_size=40))
def test_any_value_is_read_or_refused(flag, value: str) -> None:
    with contextlib.suppress(ValueError, UsageError):
        flag.read(value)


def test_shown_is_short_and_printable() -> None:
    assert flags_values.shown("\x1b[31m") == r"'\x1b[31m'"
    assert len(flags_values.shown("x" * 10**6)) < 120

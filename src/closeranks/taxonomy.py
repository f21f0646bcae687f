"""Failure leaves: what can go wrong, in the terms of Llama 3's Table 5 (arXiv 2407.21783, section 3.3.4).

``LEAVES`` is the contract: other tools key on these names, so leaves may be added and never renamed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LEAVES", "Leaf", "leaf"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One kind of failure; ``table5`` is the row of Llama 3's Table 5, "" where the table has none."""

    name: str
    table5: str
    owner: str
    meaning: str


_ROWS = (
    ("gpu.off_bus", "Faulty GPU", "hardware", "GPU fell off the PCIe bus or its handle is lost"),
    ("gpu.hbm", "GPU HBM3 Memory", "hardware", "uncorrectable ECC or remap failure in device DRAM"),
    ("gpu.sram", "GPU SRAM Memory", "hardware", "uncorrectable error in SM/L1/L2 or other on-chip memory"),
    ("gpu.sysproc", "GPU System Processor", "hardware/system", "GSP or PMU firmware failure or timeout"),
    ("gpu.nvlink", "Faulty GPU", "hardware", "NVLink error on a GPU (the peer device may be the guilty one)"),
    ("fabric.nvswitch", "Faulty GPU", "hardware", "NVSwitch fatal error"),
    ("gpu.fault_repeat", "Faulty GPU", "hardware", "the same engine exception again on the same unit"),
    ("gpu.fault_other", "Faulty GPU", "hardware", "other GPU hardware fault"),
    (
        "gpu.thermal_power",
        "GPU Thermal Interface + Sensor",
        "hardware",
        "hardware thermal slowdown or power brake",
    ),
    ("gpu.sdc", "Silent Data Corruption", "hardware", "wrong result without an error"),
    ("net.link", "Network Switch/Cable", "network", "link down or flapping; optics or cable"),
    ("net.nic", "NIC", "network", "adapter or its firmware or driver"),
    (
        "host.pcie",
        "IO Expansion Board",
        "hardware",
        "uncorrectable PCIe error (Faulty GPU where only one GPU hangs below it)",
    ),
    ("host.memory", "System Memory", "hardware", "uncorrectable host memory error"),
    ("host.cpu", "CPU", "hardware", "machine check or other CPU fault"),
    ("host.disk", "SSD", "hardware", "local disk or NVMe failure"),
    ("host.power", "Power Supply", "hardware", "power supply"),
    ("host.chassis", "Server Chassis", "hardware", "chassis or fan or backplane"),
    ("host.kernel", "Software Bug", "system", "kernel panic or lockup or hung task without a hardware cause"),
    ("host.lost", "", "unknown", "the node is gone and nothing was logged"),
    ("host.maintenance", "Host Maintenance", "operator", "unplanned work on a host"),
    ("storage.stall", "Dependency", "system", "shared file system does not answer"),
    ("storage.stale_handle", "Dependency", "system", "stale handle or transport endpoint lost"),
    ("storage.io_error", "Dependency", "system", "I/O error from a file system"),
    ("storage.full", "Dependency", "operator", "no space or quota left"),
    ("storage.ckpt_corrupt", "Software Bug", "system", "a checkpoint cannot be read back"),
    ("sys.driver", "Software Bug", "system", "driver or library mismatch or a wrong driver setting"),
    ("sys.fabricmanager", "Software Bug", "system", "fabric manager not running or not ready"),
    ("comm.timeout", "NCCL Watchdog Timeouts", "unknown", "a collective timed out and no log holds a root"),
    ("comm.desync", "Software Bug", "user", "ranks are in different collectives"),
    (
        "comm.peer_lost",
        "",
        "none",
        "secondary: the other side went away (never a final verdict if a root is known)",
    ),
    ("comm.bootstrap", "Software Bug", "system", "ranks or nodes did not meet at the store or rendezvous"),
    ("comm.port_in_use", "Software Bug", "system", "address already in use"),
    ("app.cuda_oom", "Software Bug", "user", "out of device memory"),
    ("app.cuda_memfault", "Software Bug", "user", "illegal or misaligned device memory access"),
    ("app.device_assert", "Software Bug", "user", "assertion in a device kernel"),
    ("app.host_oom", "Software Bug", "user", "killed for host memory (kernel or scheduler or cgroup)"),
    ("app.shm", "Software Bug", "user", "shared memory exhausted"),
    ("app.crash_segv", "Software Bug", "user", "segmentation fault or bus error or abort in native code"),
    ("app.env_import", "Software Bug", "user", "import or symbol or environment error"),
    ("app.config", "Software Bug", "user", "missing file or permission or configuration error"),
    ("app.exception", "Software Bug", "user", "any other exception of the script"),
    ("app.numerics_nan", "Software Bug", "user", "NaN or Inf (suspect for gpu.sdc until replayed)"),
    ("app.hang", "Software Bug", "user", "a rank stopped making progress outside any collective"),
    ("data.stall", "Software Bug", "user", "input pipeline does not deliver"),
    ("sched.preempt", "", "operator", "preempted (planned)"),
    ("sched.timeout", "", "operator", "time limit (planned)"),
    ("sched.cancel", "", "operator", "cancelled (planned)"),
    ("sched.node_fail", "Host Maintenance", "unknown", "the scheduler declared the node failed"),
    (
        "none.warning",
        "",
        "none",
        "corrected or recovered or informational (sub-leaves such as none.warning_pcie_corrected are fine)",
    ),
    ("none.healthy", "", "none", "nothing wrong"),
    ("unknown", "", "unknown", "not enough evidence; says what is missing"),
)

LEAVES: dict[str, Leaf] = {row[0]: Leaf(*row) for row in _ROWS}


def leaf(name: str) -> Leaf:
    """The leaf of that name; sub-leaves of ``none.warning_*`` resolve to ``none.warning``.

    Raises KeyError for a name that isn't in the taxonomy.
    """
    if name not in LEAVES and name.startswith("none.warning"):
        return LEAVES["none.warning"]
    return LEAVES[name]

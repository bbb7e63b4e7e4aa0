"""A real SLURM of one machine on loopback: munged, slurmctld and slurmd without systemd, all in one folder.

Nothing outside the folder is written, and only processes are signalled that were started here: each is a child of this
process, or one whose environment names the folder's slurm.conf.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")

#: Where Debian keeps the daemons; a user's PATH lacks it.
DAEMONS = "/usr/sbin"

#: Accounting and cgroups are left out: neither is here without a database and systemd. The node has no GPU. Waits are
#: as short as SLURM lets them be. `preempt_send_user_signal` makes a preempted job hear what submitit listens to.
CONF = """\
ClusterName=espalier
SlurmctldHost={host}(127.0.0.1)
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} CoresPerSocket={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes={host} PriorityTier=9 PreemptMode=OFF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
SlurmdPort={slurmd}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/controller
SlurmdSpoolDir={home}/node
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=512
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=3,bf_interval=3
KillWait=8
MinJobAge=3600
JobRequeue=1
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
"""


class NotHere(RuntimeError):
    """SLURM is not installed and cannot be, or does not start."""


def install() -> None:
    """Install SLURM from the machine's packages where it is missing.

    Raises:
        NotHere: that cannot be done, with the reason in one line.
    """
    os.environ["PATH"] += f":{DAEMONS}"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        raise NotHere(
            f"{', '.join(missing)} not found; install {' '.join(PACKAGES)} (root and apt can)"
        )
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
        done = subprocess.run(
            ("apt-get", "-q", *command), env=quiet, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise NotHere(f"apt-get {command[0]} fails: {' '.join(done.stderr.split()[-30:])}")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise NotHere(f"{', '.join(missing)} not found after installing {' '.join(PACKAGES)}")


class Box:
    """The daemons of one SLURM, children of this process.

    Args:
        home: folder of all that they read and write.
        cpus: cores that the node says it has; jobs share the real ones.
    """

    def __init__(self, home: Path, cpus: int = 2) -> None:
        self.home, self.cpus = home, cpus
        self.conf = home / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Start everything and return when the node takes jobs."""
        self._write()
        sock, key = self.home / "munge.socket", self.home / "munge.key"
        files = ("pid-file=munged.pid", "log-file=munged.log", "seed-file=munged.seed")
        options = [f"--{part.replace('=', f'={self.home}/')}" for part in files]
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={sock}", f"--key-file={key}", *options
        )
        self._until("munged's socket", sock.exists)
        self._spawn("slurmctld", "-D", "-f", str(self.conf))
        self._spawn("slurmd", "-D", "-f", str(self.conf))
        self._until("an idle node", lambda: self.ask("sinfo", "-h", "-o", "%T").strip() == "idle")

    def down(self) -> None:
        """End all jobs, then the daemons; nothing that was started here is left."""
        if {"slurmctld", "slurmd"} <= self._running.keys():
            for job in self.ask("squeue", "-h", "-o", "%A").split():
                self.ask("scancel", "--full", job)
            with_jobs = time.monotonic() + 15
            while self.ask("squeue", "-h").strip() and time.monotonic() < with_jobs:
                time.sleep(0.2)
        for name in ("slurmd", "slurmctld", "munged"):
            process = self._running.pop(name, None)
            if process is not None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if name == "slurmd":
                self._end_steps()

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM prints, errors included; it may fail."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=30
        )
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of every job in the queue by id, `12_3` in an array."""
        lines = self.ask("squeue", "-h", "-a", "-r", "-o", "%i|%T|%r").splitlines()
        return {
            job: (state, reason) for job, state, reason in (part.split("|", 2) for part in lines)
        }

    def processes(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each process that a job of this SLURM has started: its number and its command line."""
        mine = f"SLURM_CONF={self.conf}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                inside = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has ended, or is somebody else's
            of_a_job = any(part.startswith(b"SLURM_JOB_ID=") for part in inside)
            if mine in inside and (of_a_job or words[0].startswith("slurmstepd")):
                yield int(folder.name), words

    def _end_steps(self) -> None:
        """End what outlives slurmd by design: the daemons of steps, and what these have started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [pid for pid, _ in self.processes()]
            for pid in left:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + 5
            while left and any(self.processes()) and time.monotonic() < end:
                time.sleep(0.1)

    def _write(self) -> None:
        host = socket.gethostname().partition(".")[0]
        try:
            socket.gethostbyname(host)
        except OSError as error:
            raise NotHere(f"the host name {host} does not resolve: add it to /etc/hosts") from error
        for name in ("controller", "node"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)
        key = self.home / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        port = _free_port()
        self.conf.write_text(
            CONF.format(
                host=host,
                home=self.home,
                user=getpass.getuser(),
                cpus=self.cpus,
                memory=memory * 9 // 10,
                port=port,
                slurmd=_free_port(port),
            )
        )

    def _spawn(self, name: str, *options: str) -> None:
        with (self.home / f"{name}.out").open("ab") as out:
            self._running[name] = subprocess.Popen(
                (name, *options),
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # A Ctrl-C at the terminal ends the tests, which then end these.
                start_new_session=True,
            )

    def _until(self, what: str, there: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for name, process in self._running.items():
                if process.poll() is not None:
                    line = (self.home / f"{name}.out").read_text(errors="replace")[-500:]
                    raise NotHere(
                        f"{name} ended with {process.returncode}: {' '.join(line.split())}"
                    )
            if there():
                return
            time.sleep(0.1)
        raise NotHere(
            f"no {what} after a minute: {' '.join(self.ask('sinfo', '-N', '-l').split())}"
        )


@contextmanager
def running(home: Path) -> Iterator[Box]:
    """Run a SLURM for the length of a block."""
    box = Box(home)
    try:
        box.up()
        yield box
    finally:
        box.down()


def _free_port(other: int = 0) -> int:
    while True:
        with socket.socket() as job:
            job.bind(("127.0.0.1", 0))
            port = int(job.getsockname()[1])
        if port != other:
            return port

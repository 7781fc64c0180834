"""`shardwise doctor`: what is installed, what works between two ranks of this host, and what to do about the rest.

Versions and devices are looked up; transports are tried by two ranks that are started for it. A finding is `ok`,
`slower` (works, in a slower way), `absent` (optional, not there) or `failed`; the exit status is 1 if one has failed.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from shardwise._version import SUPPORTED_TORCH, __version__
from shardwise.cli.output import NO, AsJson, print_json
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines

OK, SLOWER, ABSENT, FAILED = "ok", "slower", "absent", "failed"
BETWEEN = "between ranks: "
NAME_WIDTH = len(f"{BETWEEN}sockets")
EXTRAS = {
    "safetensors": "needed by nothing here; other libraries read the same files with it",
    "PyYAML": "plans in .yaml files: pip install 'shardwise[yaml]'",
    "s3fs": "checkpoints at s3:// addresses: pip install 'shardwise[s3]'",
    "gcsfs": "checkpoints at gs:// addresses: pip install 'shardwise[gcs]'",
    "transformers": "shardwise.hf, and `shardwise model config.json`: pip install 'shardwise[hf]'",
}

NoRanks = Annotated[bool, typer.Option("--no-ranks", help="Do not start ranks: look up versions and devices only.")]


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at: how it is, what was found, and what to do about it, if anything."""

    name: str
    state: str
    found: str
    advice: str | None = None


def doctor(no_ranks: NoRanks = False, as_json: AsJson = False) -> None:
    """Say what is installed, which transports work between two ranks of this host, and what to do about the rest.

    Two local ranks are started to try the transports; that takes about ten seconds, and at most a few minutes.
    Exit status 0: all that is needed works; 1: something does not.

    \b
    Examples:
      shardwise doctor
      shardwise doctor --json
    """
    findings, width = [], NAME_WIDTH - len(BETWEEN) * no_ranks
    for finding in examine(with_ranks=not no_ranks):
        findings.append(finding)
        if not as_json:
            print_lines(finding_lines(finding, width), sys.stdout)
            sys.stdout.flush()  # each line as soon as it is known, in a pipe as well
    failed = [finding.name for finding in findings if finding.state == FAILED]
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        summary = f"does not work: {', '.join(failed)}" if failed else "all that is needed works"
        print_lines([line(), line(summary)], sys.stdout)
    if failed:
        raise typer.Exit(NO)


def examine(with_ranks: bool) -> Iterator[DoctorFinding]:
    """Everything that the command looks at, one by one; torch is loaded here, and may be what is broken."""
    yield DoctorFinding("shardwise", OK, __version__)
    yield DoctorFinding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        import torch  # loads for a second; --help does without
    except Exception as error:
        yield DoctorFinding("torch", FAILED, f"cannot be imported: {error}", "install it: pip install torch")
        yield from find_extras()
        return
    yield examine_torch(torch.__version__)
    yield from find_extras()
    yield from examine_backends()
    gpus = examine_gpus(torch.cuda)
    yield from gpus
    if with_ranks:
        yield from examine_transports(sum(finding.state == OK for finding in gpus))


def examine_torch(found: str) -> DoctorFinding:
    """Whether this release of torch is one that was tested.

    >>> examine_torch("2.13.0+cpu").state, examine_torch("2.9.1").state
    ('ok', 'failed')
    """
    low, high = (tuple(map(int, v.split("."))) for v in SUPPORTED_TORCH.removeprefix("torch ").split(" to "))
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if low <= release <= high:
        return DoctorFinding("torch", OK, found)
    advice = f"shardwise is tested with {SUPPORTED_TORCH}; install one of these"
    return DoctorFinding("torch", FAILED if release < low else SLOWER, f"{found}, not tested", advice)


def find_extras() -> list[DoctorFinding]:
    """The optional packages."""
    return [_find_package(name, purpose) for name, purpose in EXTRAS.items()]


def _find_package(name: str, purpose: str) -> DoctorFinding:
    try:
        return DoctorFinding(name, OK, version(name))
    except PackageNotFoundError:
        return DoctorFinding(name, ABSENT, "not installed", purpose)


def examine_backends() -> list[DoctorFinding]:
    """The backends of torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available():
        advice = "this build of torch has no torch.distributed: install the one from pytorch.org"
        return [DoctorFinding("gloo", FAILED, "absent", advice)]
    gloo = DoctorFinding("gloo", OK, "present") if dist.is_gloo_available() else None
    nccl = DoctorFinding("nccl", OK, "present") if dist.is_nccl_available() else None
    return [
        gloo or DoctorFinding("gloo", FAILED, "absent", "local ranks need it: install a build of torch with gloo"),
        nccl
        or DoctorFinding(
            "nccl", ABSENT, "absent", "only GPUs need it; it comes with the CUDA builds of torch for Linux"
        ),
    ]


def examine_gpus(cuda: Any) -> list[DoctorFinding]:
    """The GPUs that torch can use; `cuda` is `torch.cuda`. What torch warns of or raises is part of the finding."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            count = cuda.device_count() if cuda.is_available() else 0
            devices = [cuda.get_device_properties(i) for i in range(count)]
        except Exception as error:  # a driver that does not fit, or a GPU that has failed
            advice = "check nvidia-smi; hide a GPU that has failed from programs with CUDA_VISIBLE_DEVICES"
            return [DoctorFinding("gpus", FAILED, f"cannot be used: {first_line(error)}", advice)]
    if not devices:
        advice = "everything runs on the CPU; if there is a GPU, install a CUDA build of torch and check nvidia-smi"
        why = "".join(f" ({first_line(each.message)})" for each in warned[:1])
        return [DoctorFinding("gpus", ABSENT, f"none{why}", advice)]
    return [DoctorFinding(f"gpu {i}", OK, f"{d.name}, {format_bytes(d.total_memory)}") for i, d in enumerate(devices)]


def first_line(problem: object) -> str:
    """The first line of what an exception or a warning says.

    >>> first_line(RuntimeError("CUDA error: no device\\nCompile with TORCH_USE_CUDA_DSA"))
    'CUDA error: no device'
    """
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def examine_transports(gpus: int) -> Iterator[DoctorFinding]:
    """What two ranks of this host find out, each transport as soon as it has been tried."""
    from shardwise.comm.launch import ProbeResult, probe_transports, read_memory_limits

    advise: dict[str, Callable[[], tuple[str, str]]] = {
        "sockets": lambda: (FAILED, "allow connections to 127.0.0.1, and set GLOO_SOCKET_IFNAME to its interface (lo)"),
        "memory": lambda: (SLOWER, advise_memory_reading(*read_memory_limits())),
        "cuda ipc": lambda: (
            SLOWER,
            "ranks exchange through host memory, which is slower; run them in one container with --ipc=host, and "
            "without expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
        ),
        "nccl": lambda: (FAILED, "set NCCL_DEBUG=INFO and run a program of two ranks: nccl then says what it misses"),
    }
    try:
        for result in probe_transports(gpus):
            yield _to_finding(result, advise[result.name])
    except Exception as error:  # whatever it is, the other findings are printed
        problem = f"two ranks could not be started: {' '.join(str(error).split())}"
        yield _to_finding(ProbeResult("sockets", problem=problem), advise["sockets"])


def _to_finding(result: Any, advise: Callable[[], tuple[str, str]]) -> DoctorFinding:
    name = f"{BETWEEN}{result.name}"
    if result.works:
        rate = "" if result.bytes_per_second is None else f", {format_bytes(result.bytes_per_second)}/s"
        return DoctorFinding(name, OK, f"works{rate}")
    state, advice = advise()
    return DoctorFinding(name, state, f"does not work ({result.problem})", advice)


def advise_memory_reading(scope: int | None, can_trace: bool) -> str:
    """Why ranks may not read each other's memory, and what to change; without it they use sockets.

    >>> advise_memory_reading(2, can_trace=False)
    'ranks use sockets, which is slower; kernel.yama.ptrace_scope is 2: set it to 1, or add the capability SYS_PTRACE'
    """
    if sys.platform != "linux":
        cause = "only Linux has it"
    elif scope == 3:
        cause = "kernel.yama.ptrace_scope is 3, which stays until the next start: set it to 1 in /etc/sysctl.d"
    elif scope == 2 and not can_trace:
        cause = "kernel.yama.ptrace_scope is 2: set it to 1, or add the capability SYS_PTRACE"
    else:
        cause = "in a container, start it with --cap-add=SYS_PTRACE, which also opens its seccomp filter"
    return f"ranks use sockets, which is slower; {cause}"


def finding_lines(finding: DoctorFinding, width: int) -> list[Line]:
    """A finding as text, and what to do about it below.

    >>> for shown in finding_lines(DoctorFinding("nccl", ABSENT, "absent", "only GPUs need it"), 8):
    ...     print(shown[0].text)
    absent  nccl      absent
                      -> only GPUs need it
    """
    width = max(width, len(finding.name))
    lines = [f"{finding.state:<6}  {finding.name:<{width}}  {finding.found}"]
    lines += [f"{'':<6}  {'':<{width}}  -> {finding.advice}"] if finding.advice else []
    return [line(text) for text in lines]

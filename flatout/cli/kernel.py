"""flatout kernel check: a user's own kernel against its reference, and its speed."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flatout.cli.shared_options import DeviceOption
from flatout.cli.streams import progress_line
from flatout.terminal import tell


def kernel(
    action: Annotated[Literal["check"], typer.Argument(metavar="check", help="Test the kernel against its reference.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE.py[:NAME]", help="Defines kernel, reference and inputs; NAME: a class of it.")
    ],
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of the random sizes and values.")] = 0,
    cases: Annotated[int, typer.Option(metavar="NUMBER", help="Random cases for each dtype, besides edge sizes.")] = 24,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, and nothing is compiled by inductor.")] = False,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Do not time it.")] = False,
    no_sanitizer: Annotated[
        bool, typer.Option("--no-sanitizer", help="Do not run C++ under AddressSanitizer, on the CPU.")
    ] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="A call of the kernel that takes longer hangs.")
    ] = "60s",
    device: DeviceOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Check a kernel in C++, CUDA, Triton or Python against its reference, and time it.

    This executes FILE, in a process of its own. The kernel is called on edge sizes, dtypes, layouts in memory and
    extreme values, forwards and backwards, in torch.compile and under autocast; a mistake is shown as the smallest case
    that has it. Exit code: 0 right, 1 wrong or it does not build, 2 the file or an option cannot be used.
    """
    from flatout.kernels.custom.definition import split_target
    from flatout.kernels.custom.parent import check
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import to_text
    from flatout.report.kernel_text import kernel_document, kernel_text
    from flatout.units import parse_seconds

    call_seconds = parse_seconds(timeout)
    path, _ = split_target(file)
    show_only(device)
    tell(f"{path} is executed now, in a process of its own")
    with progress_line() as progress:
        found = check(
            file,
            seed=seed,
            cases=cases,
            quick=quick,
            timing=not no_timing,
            sanitize=not no_sanitizer,
            call_seconds=call_seconds,
            progress=progress,
        )
    print(to_text(kernel_document(found)) if json else kernel_text(found))
    return 0 if found.ok else 1

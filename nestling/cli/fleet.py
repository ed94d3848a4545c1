"""Commands of a fleet of real devices."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nestling.cli.completing import complete_device
from nestling.cli.shared import Loggers, Overrides, complain, need_something_merged, say
from nestling.errors import InputError
from nestling.runfiles import score_word


def serve(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml", help="The experiment; its fleet says who can take part."
        ),
    ],
    certs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Certificates and keys (see `nestling certs`)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The run folder (default: runs/EXPERIMENT).")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen on (default: all; with --insecure 127.0.0.1)."),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8443,
    min_clients: Annotated[
        int, typer.Option(metavar="N", help="Clients that must be there to begin (0: a round's).")
    ] = 0,
    deadline: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds after which a round goes on without the late."),
    ] = 600.0,
    quorum: Annotated[
        int,
        typer.Option(metavar="N", help="Replies that a round must have at its deadline (0: one)."),
    ] = 0,
    health: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to tell how the run is: /health, /metrics; or `off`."
        ),
    ] = "127.0.0.1:8444",
    disk_floor: Annotated[
        int, typer.Option(metavar="MB", min=0, help="Free disk below which no round begins.")
    ] = 256,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Neither TLS nor keys: this machine only.")
    ] = False,
    enclose: Annotated[
        bool,
        typer.Option(
            help="Keep Flower's own processes, and the run, in a network of their own (Linux)."
        ),
    ] = True,
    log: Loggers = None,
    set_: Overrides = None,
) -> None:
    """Serve an experiment to a fleet of real devices; the same command again goes on where the run
    stands."""
    if insecure == (certs is not None):
        raise InputError(
            "give either --certs or --insecure",
            field="--certs",
            fix="`nestling certs DIR` makes a test authority and keys",
        )
    from nestling.experiment import Experiment
    from nestling.fleet.server.server import ServeOptions, serve
    from nestling.loggers import logger_of, sends
    from nestling.runs.pictured import picture

    for name in log or ():
        logger_of(name)  # refused before anything is started
        if enclose and sends(name):
            raise InputError(
                f"{name} would send rounds elsewhere, and the run is in a network of its own",
                field="--log",
                fix="--no-enclose lets it out; or log into files, and send these",
            )
    log_to_terminal()
    if insecure:
        print("no TLS and no keys: only processes on this machine can join", file=sys.stderr)
    experiment = Experiment.read(file, tuple(set_ or ()))
    options = ServeOptions(
        experiment=experiment.to_toml(),
        out=out or Path("runs") / file.stem,
        certs=certs,
        host=host or ("127.0.0.1" if insecure else "0.0.0.0"),
        port=port,
        min_clients=min_clients or experiment.participants or 10**9,  # all there are
        deadline=deadline,
        quorum=quorum,
        health=health,
        disk_floor=disk_floor,
        enclose=enclose,
        log=tuple(log or ()),
    )
    summary = serve(options)["summary"]
    score = summary["global_score"]["last"]
    print(
        f"done: {summary['rounds_done']} rounds"
        + (f", global {score_word(summary)} {score:.2%}" if score is not None else "")
    )
    print(f"report: {options.out / 'report.html'}")
    picture(options.out)
    need_something_merged(summary)


def join(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="host or host:port.")],
    device: Annotated[
        str,
        typer.Option(
            help="What this device is: a tier of the experiment, or a device of the catalogue.",
            autocompletion=complete_device,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Its data; `experiment`: its share of the experiment's own."
        ),
    ],
    certs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="This device's key and the authority to trust."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What this device is called (default: as its key is).")
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Which client of the experiment (default: a free one of its kind)."
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(help='What training may take: a share of what is free, or a size ("300 MB").'),
    ] = "100%",
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps what it must not forget.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Neither TLS nor keys: a server on this machine only."),
    ] = False,
) -> None:
    """Join a server as one of its devices, until stopped."""
    _join(
        server,
        certs,
        name,
        folder,
        insecure,
        device=device,
        data=data,
        client=client,
        memory=memory,
    )


def gateway(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="host or host:port.")],
    devices: Annotated[
        Path,
        typer.Option(
            metavar="FILE.toml", help="The devices that it speaks for, and how they are reached."
        ),
    ],
    certs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The gateway's key and the authority to trust."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the gateway is called (default: as its key is).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps what it must not forget.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Neither TLS nor keys: a server on this machine only."),
    ] = False,
) -> None:
    """Join a server for many small devices that cannot run Python, until stopped."""
    from nestling.fleet.node.gateway import read_devices

    # what is wrong with the file is said here, and not by a process that is started again and again
    read_devices(devices)
    _join(server, certs, name, folder, insecure, device="", data="", devices=devices.absolute())


def _join(
    server: str,
    certs: Path | None,
    name: str | None,
    folder: Path | None,
    insecure: bool,
    **more: Any,
) -> None:
    if insecure == (certs is not None):
        raise InputError(
            "give either --certs or --insecure",
            field="--certs",
            fix="`nestling certs` makes keys, on the server's side",
        )

    from nestling.fleet.care.certs import check_name, device_files
    from nestling.fleet.node.joining import JoinOptions, default_folder, join
    from nestling.fleet.protocol.addresses import parse_server

    log_to_terminal()
    if insecure:
        print("no TLS and no keys: only a server on this machine can be joined", file=sys.stderr)
    address, port = parse_server(server)
    files = device_files(certs, name) if certs is not None else None
    called = files.name if files else check_name(name or platform.node(), "--name")
    place = (folder or default_folder(called)).absolute()
    join(JoinOptions(host=address, port=port, name=called, folder=place, certs=files, **more))


def certs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder of the authority; made where it is missing."
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME_OR_IP", help="What devices call the server; repeatable."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=TIER]",
            help="A device to make a key for, and all it may join as; repeatable.",
        ),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MOST",
            help="A gateway, and how many devices it may speak for; repeatable.",
        ),
    ] = None,
    revoke: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A device that may not join any more.")
    ] = None,
    renew_ca: Annotated[
        bool,
        typer.Option(
            "--renew-ca", help="A new authority; the old one stays trusted until its end."
        ),
    ] = False,
    days: Annotated[
        int,
        typer.Option(help="How long the server's certificate lasts: as the authority at most."),
    ] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what exists of what is named.")
    ] = False,
) -> None:
    """Make the certificates and keys of a fleet: an authority, the server's certificate, a key pair
    for every device."""
    from nestling.fleet.care.certs import issue

    done = issue(
        folder,
        hosts=host or (),
        devices=device or (),
        gateways=gateway or (),
        revoke=revoke or (),
        renew_ca=renew_ca,
        force=force,
        days=days,
    )
    for line in done or [
        f"nothing to do: {folder} has an authority and a server; name a --device, a --host or "
        "one to --revoke"
    ]:
        print(line)


def watch(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_URL", help="A run folder, or what `nestling serve` names as health."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print how it is now as JSON.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Where on this machine the page of a simulation is shown.")
    ] = None,
) -> None:
    """Watch a run: a fleet of real devices on the terminal, a simulation as a page of this machine
    that keeps up with it."""
    from nestling.cli.live import is_simulation

    if is_simulation(target) and not (once or as_json):
        _show_page(Path(target), port)
        return

    from nestling.cli.terminal import Console
    from nestling.fleet.care.watching import follow, status_reader, view

    read = status_reader(target)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if as_json:
        print(json.dumps(read(), indent=1))
    elif once or not console.is_terminal:
        console.print(view(read()))
    else:
        follow(read, console, max(0.2, every))


def _show_page(folder: Path, port: int | None) -> None:
    """Shows the page of a simulation until ctrl-C."""
    import threading
    from contextlib import suppress

    from nestling.cli.live import PORT, showing

    with suppress(KeyboardInterrupt), showing(folder, PORT if port is None else port) as server:
        print(f"{server.url} shows {folder} as it is; ctrl-C ends it", flush=True)
        threading.Event().wait()


def audit(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run folder of a fleet of real devices.")
    ],
) -> None:
    """Check the audit log of a fleet's run: what it holds, or the first line that is broken."""
    from nestling.fleet.care.audit import BrokenChain, audit

    try:
        lines = audit(folder)
    except BrokenChain as broken:
        complain(str(broken))
        raise typer.Exit(1) from None
    for line in lines:
        say(line)


def log_to_terminal() -> None:
    """Logs from INFO on to standard error, with secrets hidden."""
    import logging

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    from nestling.fleet.care.logs import Discreet

    for handler in logging.getLogger().handlers:
        handler.addFilter(Discreet())

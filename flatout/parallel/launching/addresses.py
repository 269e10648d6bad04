"""The addresses and interfaces of this machine: where to listen, and what ranks are told to use."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import psutil

from flatout.errors import MachineError, UsageError

LOOPBACK = "127.0.0.1"
BACKLOG = 1024


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Name of each interface -> its addresses, IPv4 first; link-local ones bear a zone (fe80::1%eth0)."""
    found: dict[str, tuple[str, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [one for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        own.sort(key=lambda one: one.family != socket.AF_INET)
        found[name] = tuple(one.address for one in own)
    return found


def address_of(interface: str) -> str:
    """The address that an interface has, given by its name or by that address itself.

    Raises UsageError, listing what is here, where there is no such interface or it has no address.
    """
    found = interface_addresses()
    if interface in found:
        if found[interface]:
            return found[interface][0]
        raise UsageError(f"the interface {interface} has no IP address", limit=_listed(found), remedy="name another")
    if interface_name(interface) is not None:
        return interface
    raise UsageError(f"no network interface {interface} on this machine", limit=_listed(found), remedy="name one")


def interface_name(address: str) -> str | None:
    """The interface that has this address; None: it is not an address of this machine."""
    found = interface_addresses()
    for name, addresses in found.items():
        if address in addresses:
            return name
    try:
        loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return None
    # All of 127.0.0.0/8 is the loopback interface's, which lists only the first.
    return next((name for name, own in found.items() if loopback and LOOPBACK in own), None)


def _listed(found: dict[str, tuple[str, ...]]) -> str:
    return "here are " + ", ".join(f"{name} ({own[0]})" for name, own in sorted(found.items()) if own)


def is_loopback(address: str) -> bool:
    """Can only this machine reach it?"""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolved(host: str) -> tuple[str, ...]:
    """The addresses of a host, in the resolver's order. Raises OSError where it has none."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only; port 0: a free one. Raises OSError, see `cannot_listen`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def is_in_use(error: OSError) -> bool:
    """Is something listening there already?"""
    return error.errno == errno.EADDRINUSE


def cannot_listen(address: str, port: int, error: OSError) -> MachineError:
    """The error in the user's words."""
    if is_in_use(error):
        return MachineError(
            f"port {port} of {address} is in use",
            limit="machine 0 listens there for the others",
            remedy="end what uses it, or choose another port in --rendezvous, on all machines",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return MachineError(
            f"{address} is not an address of this machine",
            limit="machine 0 listens on the rendezvous' address",
            remedy="put this machine's own address into --rendezvous, or name one with --interface",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return MachineError(
            f"this user may not listen on port {port}",
            limit="ports below 1024 are the system's",
            remedy="choose one from 1024 to 65535 in --rendezvous",
        )
    return MachineError(f"cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}")


def network_variables(interface: str) -> dict[str, str]:
    """The variables by which gloo, NCCL and TensorPipe use this interface, and no other."""
    # '=' asks NCCL for exactly this name; without it, for all that begin so.
    return {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
